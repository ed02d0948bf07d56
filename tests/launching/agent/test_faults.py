"""One error of the system ends the one run, template or log that it meets, wherever the agent meets it.

Each way in which a run goes is gone once to find the system calls that the agent makes for it, and then once for each
of them, which fails. The calls are those that Python's profiler reports: whatever the agent comes to call is found by
itself. A place is the innermost function of the agent's own, and the call.
"""

from __future__ import annotations

import errno
import itertools
import os
import pathlib
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from notebook_accel.launching.kernel.job import Job
from notebook_accel.protocol import agent_messages as messages
from tests.loopback import Loopback

_PLACES = ("notebook_accel.launching.agent", "notebook_accel.launching.logs")
_MODULES = ("posix", "_socket", "fcntl", "_signal", "_io", "io", "select")
# They have no such error (shutdown), make no system call at all, or wait for everything at once (poll).
_NEVER_FAIL = {
    "shutdown", "poll", "unregister", "fileno", "fspath", "decode", "detach", "getpid", "getppid", "getuid",
    "settimeout", "gettimeout", "setblocking", "getsockname", "waitstatus_to_exitcode",
}  # fmt: skip
_ERRORS = {
    "socketpair": errno.EMFILE, "open": errno.ENFILE, "memfd_create": errno.ENOMEM, "register": errno.ENOSPC,
    "recvmsg": errno.ENOMEM, "send": errno.ENOBUFS, "sendmsg": errno.ENOBUFS, "fstat": errno.ESTALE,
    "ftruncate": errno.ENOSPC,
}  # fmt: skip
_WAITS = {"chosen", "poll", "receive"}  # of the loopback, around the agent's own
# The first is no run's: without the kernel's line, there is nobody to run anything for. A memory file can be closed.
_NEVER_FAIL_AT = {"Kernel._read: recvmsg", ".open_rank: close"}


class Faults:
    """Notes where an agent makes which calls, and has the next call from one place fail.

    Attributes:
        places: Where the agent has made calls, except those for the spared run.
        fails: The place whose next call fails; empty for none.
        spared: The objects of a run that nothing is to happen to.
    """

    def __init__(self) -> None:
        self.places: set[str] = set()
        self.fails = ""
        self.spared: set[int] = set()

    def profile(self, frame: FrameType, event: str, function: Any) -> None:
        name = getattr(function, "__name__", "")
        # What is closed is so, whatever the system says; of a socket it says nothing.
        if event != ("c_return" if name == "close" else "c_call"):
            return
        if name in _NEVER_FAIL or name.startswith("_"):  # as Python does with paths, at the end of a block
            return
        owner = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
        is_method = owner == "socket" and hasattr(function, "__self__")
        if (owner not in _MODULES and not is_method) or (name == "close" and owner in ("_socket", "socket")):
            return
        place = self._place(frame, name)
        self.places.add(place)
        if place and place == self.fails:
            self.fails = ""
            number = _ERRORS.get(name, errno.EIO)
            raise OSError(number, os.strerror(number))  # after which Python profiles this thread no more

    def _place(self, frame: FrameType | None, name: str) -> str:
        ours = ""
        while frame is not None:
            module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            if module == "tests.loopback" and function not in _WAITS:
                return ""  # what another process would do
            if any(id(value) in self.spared for value in frame.f_locals.values()):
                return ""
            if module.startswith(_PLACES):
                holder = type(frame.f_locals["self"]).__name__ if "self" in frame.f_locals else ""
                ours = ours or f"{holder}.{function}: {name}"
                if function == "serve":
                    return "" if ours in _NEVER_FAIL_AT else ours
            frame = frame.f_back
        return ""


@pytest.fixture
def faults() -> Iterator[Faults]:
    made = Faults()
    threading.setprofile(made.profile)  # of threads that are started from now on, such as an agent's
    yield made
    threading.setprofile(None)


def runs(loopback: Loopback) -> Job:
    job: Job = loopback.launch()
    for rank in loopback.ranks_of(job):
        rank.step()
    loopback.advance(1.0)
    for rank in loopback.ranks_of(job):
        rank.finish()
    return job


def is_asked_and_stopped(loopback: Loopback) -> Job:
    job: Job = loopback.launch(grace_s=1.0)
    for rank in loopback.ranks_of(job):
        rank.ignores = {signal.SIGINT, signal.SIGTERM}
    job.send_order(messages.Inspect(job_id=job.id))  # type: ignore[misc]
    job.interrupt(escalate=False)
    job.stop()
    return job


def restarts(loopback: Loopback) -> Job:
    job: Job = loopback.launch(max_restarts=1)
    for rank in loopback.ranks_of(job)[1:]:
        rank.fail(ValueError("boom"))
    loopback.advance(1.0)
    for rank in loopback.ranks_of(job):
        rank.finish()
    return job


def loses_its_template(loopback: Loopback) -> Job:
    loopback.delays_ranks = True
    job: Job = loopback.launch()
    loopback.templates[-1].kill()
    loopback.advance(1.0)
    loopback.templates[-1].kill()
    return job


def play(faults: Faults, go: Callable[[Loopback], Job], folder: pathlib.Path, place: str = "") -> set[str]:
    """Let a run go so, while a call fails, beside another run with a template of its own. Return the calls."""
    with pytest.MonkeyPatch.context() as patch:
        folder.mkdir()
        patch.setattr(tempfile, "tempdir", str(folder))  # which has no logs of earlier runs
        loopback = Loopback(patch)
        other = loopback.launch(name="other")
        patch.setenv("TORCH_OF_THIS_TEST", "1")  # so that the next launch gets another template
        agent = loopback.agents[0].agent
        run = agent._runs[other.id]
        template = agent._templates.of(run)
        kept = [run, template, template.connection, *run.ranks]
        kept += [part for rank in run.ranks for part in (rank.log, rank.connection)]
        faults.spared = set(map(id, kept))
        faults.places.clear()
        faults.fails = place
        job = go(loopback)
        assert job.wait(200.0), place
        assert not faults.fails, f"{place} was not called again"
        assert loopback.agents[0].returncode is None and len(loopback.agents) == 1, place
        assert (other.status, len(loopback.ranks_of(other))) == ("running", 2), place
        found = faults.places - {""}
        faults.spared.clear()
        loopback.close()
    return found


@pytest.mark.usefixtures("state_home")
def test_error_ends_the_run_that_met_it_and_no_other(faults: Faults, tmp_path: pathlib.Path) -> None:
    folders = (tmp_path / str(number) for number in itertools.count())
    known: set[str] = set()
    for go in (runs, is_asked_and_stopped, restarts, loses_its_template):
        new = play(faults, go, next(folders)) - known
        known |= new
        for place in sorted(new):
            play(faults, go, next(folders), place)
    assert len(known) >= 30
