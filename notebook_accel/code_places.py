"""Places in the user's code, with the notebook's names: ``In[3], line 7``; and which calls wait for other ranks."""

from __future__ import annotations

import itertools
import os
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping

OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
"""The folder of this package's code."""
_BACKENDS = os.path.join(OURS, "training", "backends")
# What ranks wait in for each other, by the file and the name of the function.
_MEETINGS = {
    (os.path.join(_BACKENDS, "torch_group.py"), "_meet"): "Accelerator",
    (os.path.join(_BACKENDS, "watchdog.py"), "absent_ranks"): "a checkpoint",
}
# Functions of torch that wrap collectives.
_COLLECTIVE_WRAPPERS = {"wrapper", "wait", "_dispatch", "__call__", "__init__", "_exception_logger"}


def _folders(*names: str) -> tuple[str, ...]:
    """Return folders of this Python, also by their real paths."""
    paths = {sysconfig.get_paths()[name] for name in names}
    return tuple(sorted(folder + os.sep for folder in paths | set(map(os.path.realpath, paths))))


# Folders of code that the user hasn't written: installed packages, Python's and ours.
_INSTALLED = _folders("purelib", "platlib")
_OF_PYTHON = _folders("stdlib", "platstdlib")
LIBRARIES = (*_INSTALLED, *_OF_PYTHON)
_PYTHONS = (*_OF_PYTHON, "<frozen", "<string>")
_LOGGER = os.path.join("torch", "distributed", "c10d_logger.py")  # wraps torch's collectives
_NOT_THE_USERS = (OURS, *LIBRARIES, "<")  # such as <eval_with_key>.0, which torch.fx has generated
# Readable names for calls into libraries.
_CALLS = {
    "__iter__": "the loader",
    "__next__": "the loader",
    "_wrapped_call_impl": "the model's forward pass",
    "_call_impl": "the model's forward pass",
    "__call__": "the model's forward pass",
    "__enter__": "entering a context",
    "__exit__": "leaving a context",
    "__init__": "making an object",
}

_labels: dict[str, str] = {}


def name_files(labels: Mapping[str, str]) -> None:
    """Set the names by which the user knows files, such as ``In[3]`` for a cell's file."""
    _labels.update(labels)


def describe(frame: types.FrameType | None) -> str:
    """Describe a thread by its innermost frame: ``gather at In[3], line 7``.

    The text has the innermost line of the user's code, and the call that left the user's code there, if there is one.
    """
    call = ""
    for current in _outwards(frame):
        filename = current.f_code.co_filename
        if is_the_users(filename):
            where = f"{label(filename)}, line {current.f_lineno}"
            return f"{call} at {where}" if call else where
        if not filename.endswith(_LOGGER):
            call = _CALLS.get(current.f_code.co_name, current.f_code.co_name)
    return call


def library_calls(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """Yield a thread's frames below the user's innermost line, beginning with the innermost one."""
    return itertools.takewhile(lambda current: not is_the_users(current.f_code.co_filename), _outwards(frame))


def warn(text: str) -> None:
    """Warn at the innermost line of the user's code."""
    below = sum(1 for _ in library_calls(sys._getframe()))
    warnings.warn(text, stacklevel=below + 1)


def runs_only_ours(frame: types.FrameType | None) -> bool:
    """Return whether a thread runs neither user code nor library code, as a session's rank between two cells."""
    return all(_is_ours_or_pythons(current.f_code.co_filename) for current in _outwards(frame))


def waits_for_ranks(frame: types.FrameType | None) -> bool:
    """Return whether a thread may wait for other ranks."""
    return bool(awaited((call.f_code.co_filename, call.f_code.co_name) for call in library_calls(frame)))


def awaited(calls: Iterable[tuple[str, str]]) -> str:
    """Return the call in which a thread waits for other ranks, such as ``all_reduce``; empty if none can be seen.

    A backward pass counts: in it, DistributedDataParallel waits for the other ranks' gradients. So does its forward
    pass before it calls the model, when it compares buckets and buffers, and the constructor of an ``Accelerator``, in
    which the ranks meet, and the beginning of a checkpoint.

    Args:
        calls: File and function of each call below the user's innermost line, beginning with the innermost one.
    """
    found = ""
    for number, (file, function) in enumerate(calls):
        if "/torch/distributed/" in file and function not in _COLLECTIVE_WRAPPERS:
            found = function  # the outermost is the one that users call
        elif function == "_engine_run_backward":
            found = found or "backward"
        elif number == 0 and file.endswith("/torch/nn/parallel/distributed.py"):
            found = "forward"
        else:
            found = _MEETINGS.get((file, function), found)
    return found


def label(filename: str) -> str:
    """Return the name by which the user knows a file."""
    return _labels.get(filename, filename)


def is_the_users(filename: str) -> bool:
    """Return whether the user has written this file's code."""
    return filename in _labels or not filename.startswith(_NOT_THE_USERS)


def package_of(filename: str) -> str:
    """Return the installed package that a file belongs to; ``Python`` for the standard library."""
    for folder in _INSTALLED:
        if filename.startswith(folder):
            return filename.removeprefix(folder).partition(os.sep)[0].removesuffix(".py")
    return "notebook_accel" if filename.startswith(OURS) else "Python"


def _is_ours_or_pythons(filename: str) -> bool:
    if filename in _labels:
        return False
    # This package can be installed, and installed packages can be in a folder of Python's.
    return filename.startswith(OURS) or (filename.startswith(_PYTHONS) and not filename.startswith(_INSTALLED))


def _outwards(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
