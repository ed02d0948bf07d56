"""The processes below a process, read from /proc, and waiting with a deadline."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@dataclasses.dataclass(frozen=True)
class Process:
    """A process as /proc shows it. Equal only to itself: a reused pid has another start time."""

    pid: int
    started: int
    parent: int = dataclasses.field(compare=False)
    session: int = dataclasses.field(compare=False)
    state: str = dataclasses.field(compare=False)
    command: str = dataclasses.field(compare=False)

    def __str__(self) -> str:
        return f"{self.pid} (parent {self.parent}, state {self.state}): {self.command}"

    @property
    def is_alive(self) -> bool:
        now = read(self.pid)
        return now is not None and now.started == self.started and now.state not in "ZX"


def read(pid: int) -> Process | None:
    """The process with this pid, ``None`` if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            stat = file.read().decode(errors="replace")
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    # The name stands in brackets and may hold anything, brackets too: split after the last one.
    name, _, rest = stat.partition("(")[2].rpartition(") ")
    values = rest.split()
    return Process(
        pid=pid,
        started=int(values[19]),
        parent=int(values[1]),
        session=int(values[3]),
        state=values[0],
        command=command or f"[{name}]",
    )


def is_agent(process: Process) -> bool:
    """Return whether this is an agent, which supervises the ranks of a kernel."""
    return "notebook_accel.launching.agent.agent" in process.command


def is_template(process: Process) -> bool:
    """Return whether this is a template, or a rank forked from one, which has the same command line."""
    return "notebook_accel.launching.template.template" in process.command


def below_template() -> list[Process]:
    """The ranks and elastic processes of this process's runs."""
    agents = [process for process in children(os.getpid()) if is_agent(process)]
    templates = [process for agent in agents for process in children(agent.pid)]
    return [process for template in templates for process in children(template.pid) if process.state != "Z"]


def children(pid: int) -> list[Process]:
    """The direct children of ``pid``, ended ones that nobody has waited for too."""
    return _read_all(_pids_by_parent().get(pid, []))


def descendants(pid: int) -> list[Process]:
    """All living processes below ``pid``, nearest first."""
    return [process for process in everything_below(pid) if process.state not in "ZX"]


def everything_below(pid: int) -> list[Process]:
    """All processes below ``pid``, nearest first, and among them the ended ones that nobody has waited for."""
    by_parent = _pids_by_parent()
    found: list[int] = []
    parents = [pid]
    while parents:
        below = by_parent.get(parents.pop(0), [])
        found += below
        parents += below
    return _read_all(found)


def _pids_by_parent() -> dict[int, list[int]]:
    """Of the whole machine. No more is read of a stranger than that, since this happens before and after each test."""
    table: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/stat", "rb", buffering=0) as file:
                parent = file.read(4096).rpartition(b") ")[2].split(b" ", 2)[1]
                table.setdefault(int(parent), []).append(int(entry))
    return table


def _read_all(pids: Iterable[int]) -> list[Process]:
    return [process for process in map(read, pids) if process is not None]


def wait_until(condition: Callable[[], _T], what: str, timeout_s: float = 20.0, poll_s: float = 0.01) -> _T:
    """Returns the condition's first true value; fails with ``what`` if there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(poll_s)


def memory_bytes(found: Iterable[Process]) -> int:
    """Return the memory of these processes together; a page that several of them share counts once."""
    rows = [row.split() for process in found for row in _rollup(process.pid).splitlines()]
    return sum(1024 * int(row[1]) for row in rows if row[0] == "Pss:")


def _rollup(pid: int) -> str:
    try:
        return pathlib.Path("/proc", str(pid), "smaps_rollup").read_text()
    except OSError:  # it has just ended, and takes nothing
        return ""


def memory_files(pid: int) -> set[str]:
    """Names of the anonymous memory files of ours that a process holds open."""
    found = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if target.startswith("/memfd:notebook-accel"):
                found.add(target.removeprefix("/memfd:").removesuffix(" (deleted)"))
    return found


def adopt_orphans() -> None:
    """Makes this process the parent of what its descendants leave behind, so that ``descendants`` still finds it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def kill(process: Process, number: signal.Signals = signal.SIGKILL) -> bool:
    """Send a signal, if the process still lives; return whether it was sent.

    Raises:
        AssertionError: The process is the tests' own, or one above them. An orphan has the tests for its parent
            (``adopt_orphans``), so who looks for a process by its child may find them.
    """
    if not process.is_alive:
        return False
    assert process.pid not in _own_line(), f"a test is about to send {number.name} to itself: {process}"
    with contextlib.suppress(ProcessLookupError):  # it has just been waited for
        os.kill(process.pid, number)
        return True
    return False


def _own_line() -> set[int]:
    """This process and those above it, whether this namespace shows them or not."""
    found: set[int] = {0}
    process = read(os.getpid())
    while process is not None and process.pid not in found:
        found.add(process.pid)
        process = read(process.parent)
    return found
