"""The engine whose ranks are forks of the kernel, so that they share its objects without copying them.

The kernel forks once. The child becomes a template for this run only, which forks the ranks as every template does. So
supervision, output, results and ends are the same as for ranks that start clean.

A dedicated thread forks the child, for three reasons. GNU's OpenMP hangs in a fork of a thread that has computed with
several threads, and this thread has computed nothing. Linux sends the parent-death signal when the parent's *thread*
ends, and this thread ends only with the kernel or after the child. And a thread must wait for the child, to reap it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import sys
import threading
import traceback
import types
import warnings
from typing import Any, NoReturn

from notebook_accel.errors import ProcessStartError
from notebook_accel.interrupts import Latch
from notebook_accel.launching import processes
from notebook_accel.launching.kernel import local, run_payload
from notebook_accel.launching.kernel.agent_process import ForkedTemplate
from notebook_accel.launching.kernel.job import Job, LaunchRequest
from notebook_accel.launching.ranks import streams
from notebook_accel.launching.ranks.worker import Inherited
from notebook_accel.launching.template import preloading, template
from notebook_accel.payload import serialization
from notebook_accel.protocol.channel import Connection

_FORK_DEADLINE_S = 30.0
# Files that a fork must not share: the kernel's connections to front end and agent, and the objects that poll them.
_UNSHARED = (
    "socket:",
    "anon_inode:[eventfd]",
    "anon_inode:[eventpoll]",
    "anon_inode:[pidfd]",
    "anon_inode:[timerfd]",
)


def launch(request: LaunchRequest) -> Job:
    """Start ranks that are forks of this process."""
    by_value = _definitions(request)
    nothing = serialization.pickle_by_value(None, roots={})
    pickled = dataclasses.replace(nothing, by_value=by_value)
    inherited = Inherited(request.target, by_value)
    with run_payload.prepared_run(request, pickled) as (job, payload):
        local.engine().launch_forked(job, payload, lambda log: _Forking(inherited, log).fork())
    return job


def _definitions(request: LaunchRequest) -> tuple[Any, ...]:
    """Return the notebook's functions and classes, which ranks send back by reference."""
    candidates = [*vars(sys.modules["__main__"]).values(), request.target.function]
    return tuple(
        {
            id(obj): obj
            for obj in candidates
            if isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__"
        }.values()
    )


class _Forking:
    """The thread that forks the template, which writes to ``log``, and waits for its end."""

    def __init__(self, inherited: Inherited, log: int) -> None:
        self._inherited = inherited
        self._log = log
        self._kernel_pid = os.getpid()
        self._ours, self._theirs = Connection.pair()
        self._pid, self._pidfd = 0, -1
        self._error: OSError | None = None
        self._has_forked = Latch()

    def fork(self) -> ForkedTemplate:
        """Fork the template and return it.

        Raises:
            ProcessStartError: The fork has failed.
        """
        thread = threading.Thread(target=self._run, name="notebook-accel-fork", daemon=True)
        try:
            thread.start()
            self._has_forked.wait(_FORK_DEADLINE_S)
        except BaseException:
            self._ours.close()  # this ends a template that was forked already
            raise
        if self._pidfd < 0:
            self._ours.close()
            raise ProcessStartError(f"The kernel could not be forked: {self._error or 'it takes too long'}.")
        return ForkedTemplate(self._ours, self._pid, self._pidfd)

    def _run(self) -> None:
        collects_garbage = gc.isenabled()
        gc.disable()  # a fork can't destroy a garbage process group, whose threads it doesn't have
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which preflight has checked
                pid = os.fork()
            if pid == 0:
                gc.freeze()
                self._become_template()
            self._pid, self._pidfd = pid, processes.pidfd_open(pid)
        except OSError as error:
            self._error = error
            return
        finally:
            if collects_garbage:
                gc.enable()
            self._theirs.close()
            self._has_forked.set()
        with contextlib.suppress(ChildProcessError):  # other code in the kernel has reaped the child
            os.waitpid(pid, 0)

    def _become_template(self) -> NoReturn:
        """Serve as the template until the end. Runs in the child process."""
        status = 1
        try:
            template.come_under(self._kernel_pid)
            _detach_from_kernel(keep={self._theirs.fileno(), self._log}, log=self._log)
            preloading.import_needed()
            template.Template(self._theirs, self._inherited).serve()
            status = 0
        except SystemExit:
            status = 0
        except BaseException:  # noqa: BLE001 - the log is the only place to report it
            os.write(self._log, traceback.format_exc().encode())
        finally:
            os._exit(status)


def _detach_from_kernel(keep: set[int], log: int) -> None:
    """Detach a fork from the kernel's signals, resource tracker, output and connections."""
    signal.set_wakeup_fd(-1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    held = sys.stdout, sys.stderr  # by the handlers of loggers, and others
    streams.replace_streams()
    for old, new in zip(held, (sys.stdout, sys.stderr), strict=True):
        with contextlib.suppress(AttributeError):
            old.write, old.flush = new.write, new.flush  # type: ignore[method-assign]
    tracker = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    if tracker is not None:
        tracker._fd = tracker._pid = None  # ranks start their own, which removes their shared memory when they end
    nowhere = os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stderr = os.fdopen(os.dup(nowhere), "w")
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):  # the descriptor that listed the folder is closed already
            if os.readlink(f"/proc/self/fd/{name}").startswith(_UNSHARED) and descriptor not in keep:
                # Keep the number in use: the object that owns it may close it at any time, and must not hit a new file.
                os.dup2(nowhere, descriptor)
    os.dup2(nowhere, 0)
    os.close(nowhere)
