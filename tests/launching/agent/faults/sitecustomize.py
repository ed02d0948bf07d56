"""Python imports this in each process that finds it. In an agent, it has system calls fail when it is told to.

SIGUSR1 makes it read its orders, from the file that ``FAULTS`` names: to note from where the agent makes which calls,
or to have the next call from such a place fail once. A place is the innermost function of the agent's own and the call.
The calls are those that Python's profiler reports: whatever the agent comes to call is found by itself.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import pathlib
import signal
import sys
from types import FrameType
from typing import Any

_AGENT = "notebook_accel.launching.agent"
_PLACES = (_AGENT, "notebook_accel.launching.logs")
_MODULES = ("posix", "_socket", "fcntl", "_posixsubprocess", "_signal", "_io", "select")
# They have no such error (shutdown and waitpid), make no system call at all, or wait for everything at once (poll).
_NEVER_FAIL = {
    "shutdown", "waitpid", "WIFSTOPPED", "poll", "unregister", "fileno", "fspath", "decode", "detach", "getpid",
    "getppid", "getuid", "settimeout", "gettimeout", "setblocking", "getsockname", "signal", "_path_normpath",
    "waitstatus_to_exitcode",
}  # fmt: skip
_ERRORS = {
    "fork_exec": errno.E2BIG, "socketpair": errno.EMFILE, "open": errno.ENFILE, "memfd_create": errno.ENOMEM,
    "register": errno.ENOSPC, "recvmsg": errno.ENOMEM, "send": errno.ENOBUFS, "sendmsg": errno.ENOBUFS,
    "fstat": errno.ESTALE, "ftruncate": errno.ENOSPC, "pipe": errno.EMFILE, "pipe2": errno.EMFILE,
}  # fmt: skip


class Faults:
    def __init__(self) -> None:
        self._places: set[str] = set()
        self._order: dict[str, Any] = {}
        self._spared: set[int] = set()

    def take_order(self, *_: object) -> None:
        sys.setprofile(None)
        folder = pathlib.Path(os.environ["FAULTS"])
        self._order = json.loads((folder / "order").read_text())
        if self._order.get("note"):
            (folder / self._order["note"]).write_text(json.dumps(sorted(self._places)))
            self._places.clear()
        self._spared = self._all_of(self._order["spared"])
        (folder / "taken").write_text(self._order["number"])
        sys.setprofile(self._profile)

    def _all_of(self, job_id: str) -> set[int]:
        """The objects of a run that nothing is to happen to, and of its template."""
        kept = []
        for agent in [thing for thing in gc.get_objects() if type(thing).__name__ == "Agent"]:
            run = agent._runs[job_id]
            template = agent._templates.of(run)
            kept += [run, template, template.connection]
            for rank in run.ranks:
                kept += [rank, rank.log, rank.connection]
        return {id(thing) for thing in kept}

    def _profile(self, frame: FrameType, event: str, function: Any) -> None:
        name = getattr(function, "__name__", "")
        # What is closed is so, whatever the system says; of a socket it says nothing.
        if event != ("c_return" if name == "close" else "c_call") or name in _NEVER_FAIL:
            return
        owner = getattr(function, "__module__", None) or type(getattr(function, "__self__", None)).__module__
        if owner not in _MODULES and not (owner == "socket" and hasattr(function, "__self__")) and owner != "io":
            return
        if name == "close" and owner in ("_socket", "socket"):
            return
        place = self._place(frame, name)
        if place is None:
            return
        self._places.add(place)
        if place == self._order.get("fail"):
            pathlib.Path(os.environ["FAULTS"], "fired").touch()
            number = _ERRORS.get(name, errno.EIO)
            raise OSError(number, os.strerror(number))  # after which Python profiles no more

    def _place(self, frame: FrameType | None, name: str) -> str | None:
        ours = ""
        while frame is not None:
            if any(id(value) in self._spared for value in frame.f_locals.values()):
                return None
            if not ours and frame.f_globals.get("__name__", "").startswith(_PLACES):
                holder = type(frame.f_locals["self"]).__name__ if "self" in frame.f_locals else ""
                ours = f"{holder}.{frame.f_code.co_name}: {name}"
            frame = frame.f_back
        return ours or None


if f"{_AGENT}.agent" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, Faults().take_order)
