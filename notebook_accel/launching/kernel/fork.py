"""The engine whose ranks are forks of the kernel, so that they share its objects without copying them.

The kernel forks once. That child becomes a template for this one run: it forks the ranks, as every template does, so
that supervision, output, results and ends are the same as of ranks that start clean.

It is forked by a thread that does nothing else, for three reasons. GNU's OpenMP hangs in a fork of a thread that has
computed with several threads, and this one has computed nothing. The signal that the child gets at its parent's end is
sent when that *thread* ends, and this one ends only with the kernel or after the child. And somebody has to wait for
the child.
"""

from __future__ import annotations

import atexit
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

from notebook_accel import uninterruptible
from notebook_accel.errors import ProcessStartError
from notebook_accel.launching import processes
from notebook_accel.launching.kernel import local, run_payload
from notebook_accel.launching.kernel.agent_process import TemplateLine
from notebook_accel.launching.kernel.engine import LaunchRequest
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.ranks.worker import Inherited
from notebook_accel.launching.template import preloading, template
from notebook_accel.payload import serialization
from notebook_accel.protocol.channel import Connection
from notebook_accel.uninterruptible import Latch

_FORK_DEADLINE_S = 30.0
# What a fork must not share: the kernel's lines to its front end, to the agent, and whatever waits on them.
_LINES = ("socket:", "anon_inode:[eventfd]", "anon_inode:[eventpoll]", "anon_inode:[pidfd]", "anon_inode:[timerfd]")


class ForkEngine:
    """Runs ranks that are forks of this process."""

    def launch(self, request: LaunchRequest) -> Job:
        """Start the ranks. See ``Engine``."""
        return uninterruptible.call(lambda: self._launch(request), Job.discard, request.foreground_lock)

    def _launch(self, request: LaunchRequest) -> Job:
        by_value = _definitions(request)
        nothing = serialization.pickle_by_value(None, roots={})
        pickled = dataclasses.replace(nothing, by_value=by_value)
        inherited = Inherited(request.target, by_value)
        with run_payload.prepared_run(request, pickled) as prepared:
            local.engine().launch_forked(prepared, lambda log: _Forking(inherited, log).template())
        return prepared.job


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
    """The thread that forks the template and waits for its end.

    Args:
        inherited: The target, which the ranks inherit.
        log: Descriptor of the file that the template writes to.
    """

    def __init__(self, inherited: Inherited, log: int) -> None:
        self._inherited = inherited
        self._log = log
        self._kernel_pid = os.getpid()
        self._ours, self._theirs = Connection.pair()
        self._pid, self._pidfd = 0, -1
        self._error: OSError | None = None
        self._has_forked = Latch()

    def template(self) -> TemplateLine:
        """Fork the template and return the line to it.

        Raises:
            ProcessStartError: The system wouldn't.
        """
        thread = threading.Thread(target=self._run, name="notebook-accel-fork", daemon=True)
        try:
            thread.start()
            self._has_forked.wait(_FORK_DEADLINE_S)
        except BaseException:
            self._ours.close()  # which ends the template, if it is there already
            raise
        if self._pidfd < 0:
            self._ours.close()
            raise ProcessStartError(f"The kernel could not be forked: {self._error or 'it takes too long'}.")
        return TemplateLine(self._ours, self._pid, self._pidfd)

    def _run(self) -> None:
        collects_garbage = gc.isenabled()
        gc.disable()  # a process group that is garbage can't be destroyed in a fork, which has none of its threads
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of threads; preflight has looked at them
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
        with contextlib.suppress(ChildProcessError):  # somebody has waited for whatever ends
            os.waitpid(pid, 0)

    def _become_template(self) -> NoReturn:
        """Serve as the template until the end. Runs in the child."""
        status = 1
        try:
            template.come_under(self._kernel_pid)
            _let_go_of_the_kernel(keep={self._theirs.fileno(), self._log}, log=self._log)
            preloading.import_needed()
            template.serve(self._theirs, self._inherited)
            status = 0
        except SystemExit:
            status = 0
        except BaseException:  # noqa: BLE001 - nobody else would say it
            os.write(self._log, traceback.format_exc().encode())
        finally:
            os._exit(status)


def _let_go_of_the_kernel(keep: set[int], log: int) -> None:
    """Undo what is right for the kernel and wrong for a fork of it."""
    signal.set_wakeup_fd(-1)
    atexit._clear()  # what was registered there is to be done once, by the kernel
    os.dup2(log, 1)
    os.dup2(log, 2)
    nowhere = os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stderr = os.fdopen(os.dup(nowhere), "w")
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with contextlib.suppress(OSError):  # the one that lists the folder
            if os.readlink(f"/proc/self/fd/{name}").startswith(_LINES) and descriptor not in keep:
                # Its number stays taken: the objects that own it may close it at any time, and must not hit another.
                os.dup2(nowhere, descriptor)
    os.dup2(nowhere, 0)
    os.close(nowhere)
