"""A rank's end, once its code has ended: like that of a Python process, but without the interpreter's own end."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import itertools
import logging
import os
import stat
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from notebook_accel import code_places, torch_internals
from notebook_accel.launching import processes
from notebook_accel.launching.ranks import interruption, streams

_SILENT_EXIT_S = 2.0
_STREAMS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_DEFINITIONS = (type, types.ModuleType, types.FunctionType)

_finalizers: dict[Any, Any] = {}
_finalizers_before = 0  # number of exit finalizers that were made before the fork
kernels_names: dict[str, Any] = {}  # in a fork of the kernel, whose objects only the kernel destroys; else empty


def forget_exits() -> None:
    """Forget what is registered for the exit of this process, which forks ranks.

    As in any forked process, only what is registered after the fork runs there. A library that has made a temporary
    folder before, for example, must not remove it at the end of each rank.
    """
    atexit._clear()
    logging._handlerList.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]  # the next one registers itself
    atexit.register(logging.shutdown)
    if (multiprocessing := sys.modules.get("multiprocessing.util")) is not None:
        atexit.register(multiprocessing._exit_function)


def begin() -> None:
    """Note, right after the fork, which exit finalizers are those of the process that was forked."""
    global _finalizers_before
    with contextlib.suppress(AttributeError):  # private to Python
        _finalizers_before = next(weakref.finalize._index_iter)  # type: ignore[attr-defined]


def leave(*, is_waited_for: bool, inherited_modules: int) -> None:
    """End as Python does, up to the flushed streams: the interpreter's own end takes long with torch.

    An interrupt ends one step, and the next one follows. ``inherited_modules`` is the number of modules that came with
    the fork.
    """
    steps: dict[str, Callable[[], object]] = {
        "its threads": threading._shutdown,  # type: ignore[attr-defined]  # waits for those that aren't daemons
        "functions registered with atexit": atexit._run_exitfuncs,  # also ends DataLoader workers
        "objects that it destroys, such as open files": lambda: _destroy_objects(inherited_modules),
        "the removal of its shared memory": processes.end_tracker,
    }
    torch_internals.show_compile_times()
    _leave_out_finalizers()
    what = ""
    late = late_told("waits at most a minute", lambda: what) if is_waited_for else contextlib.nullcontext()
    with late:
        for what, step in steps.items():  # noqa: B007 - read when the time comes to print it
            with contextlib.suppress(Exception, KeyboardInterrupt):
                try:
                    with contextlib.suppress(KeyboardInterrupt):  # an earlier interrupt must not skip this
                        interruption.allow()
                    step()
                finally:
                    interruption.defer()
    streams.flush()


def _destroy_objects(inherited_modules: int) -> None:
    """Destroy what the user's modules hold, so that files that are still open are written and closed.

    Names go in the reverse order of their definition, those of modules, functions, classes and constants last, so that
    a ``__del__`` still finds what it uses. In a process that has imported much, a look at all objects takes 100 ms. So
    it is only taken if something could be lost: in a file that is open, or by a ``__del__`` of the user's.
    """
    threading.excepthook = lambda _: None  # daemon threads still run, and miss their names from now on
    streams.restore()
    if _has_files_to_write():
        _flush_files()
    namespaces = list(_users_namespaces(inherited_modules))
    modules = {names.get("__name__") for names in namespaces}
    for is_last in (False, True):
        has_finalizers = any(
            issubclass(type(value), type) and value.__module__ in modules and hasattr(value, "__del__")
            for names in namespaces
            for value in names.values()
        )
        for names in namespaces:
            for name in reversed(list(names)):
                value = names.get(name)
                stays = not is_last and (issubclass(type(value), _DEFINITIONS) or not gc.is_tracked(value))
                if not stays and kernels_names.get(name) is not value:
                    names.pop(name, None)
                del value  # now, before the next name goes
        if has_finalizers or _has_files_to_write():
            # A collection may close a file before it destroys the buffer in front of the file.
            kept = [file for file in _flush_files() if type(getattr(file, "raw", None)) is io.FileIO]
            gc.collect()
            _flush_files()
            del kept


def _users_namespaces(inherited_modules: int) -> Iterator[dict[str, Any]]:
    """Yield the names of the user's modules, without those that came with the fork, the last imported first."""
    yield sys.modules["__main__"].__dict__
    # From the end: whatever looks at a module of before the fork copies a page of memory.
    for module in list(itertools.islice(reversed(sys.modules.values()), max(0, len(sys.modules) - inherited_modules))):
        if isinstance(module, types.ModuleType):
            names = object.__getattribute__(module, "__dict__")  # a module may load itself when it is used
            if isinstance(file := names.get("__file__"), str) and code_places.is_the_users(file):
                yield names


def _has_files_to_write() -> bool:
    """Return whether a file on disk is open for writing."""
    import fcntl  # where there is none, nothing is launched

    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            found = os.fstat(descriptor)
            is_on_disk = stat.S_ISREG(found.st_mode) and found.st_nlink and descriptor > 2  # nor the rank's log
            if is_on_disk and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                return True
        except OSError:  # the descriptor that listed the folder is closed already
            continue
    return False


def _flush_files() -> Sequence[Any]:
    """Flush the files that this process has opened, and return them. Those of before its fork are frozen."""
    files = [obj for obj in gc.get_objects() if issubclass(type(obj), _STREAMS)]
    for file in files:
        with contextlib.suppress(Exception):  # it is closed, or its disk is full
            file.flush()
    return files


def _leave_out_finalizers() -> None:
    """Keep the exit from running finalizers of before the fork: torch's alone take 40 ms, and a look at each 1 ms."""
    global _finalizers
    _finalizers = getattr(weakref.finalize, "_registry", {})  # kept, since to destroy it takes long too
    own = itertools.takewhile(lambda item: item[1].index > _finalizers_before, reversed(_finalizers.items()))
    weakref.finalize._registry = dict(reversed(list(own)))  # type: ignore[attr-defined]


@contextlib.contextmanager
def late_told(waits: str, what: Callable[[], str]) -> Iterator[None]:
    """Print what the rank waits for in the body, if that takes a while."""
    late = threading.Timer(_SILENT_EXIT_S, _report_late_exit, [waits, what])
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def _report_late_exit(waits: str, what: Callable[[], str]) -> None:
    main = threading.main_thread()
    threads = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
    kept_by = f"its threads {', '.join(threads)}" if threads else what()
    text = f"[the function has returned; this rank {waits} for {kept_by}. Interrupt to end it now.]\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())  # sys.stderr may be the user's by now
