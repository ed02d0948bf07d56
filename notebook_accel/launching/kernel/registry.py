"""The runs of this kernel by name and number, for callers that have no ``Job``."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pathlib
import shlex
import time
import weakref
from collections.abc import Iterable

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launching import run_folders
from notebook_accel.launching.kernel import detached_runs
from notebook_accel.launching.kernel.detached_job import DetachedJob
from notebook_accel.launching.kernel.job import Ending, Job

_MOST_ENTRIES = 50


@dataclasses.dataclass(frozen=True)
class Entry:
    """One run. An entry holds no results, so that many can be kept."""

    number: int  # among this process's runs, from 1
    name: str
    devices: str
    began: float  # seconds since the epoch
    ending: Ending
    log_files: tuple[pathlib.Path, ...]
    id: str
    _job: weakref.ref[Job]

    @property
    def job(self) -> Job | None:
        """The run's job, ``None`` if nothing refers to the job any more."""
        return self._job()

    @property
    def is_running(self) -> bool:
        """True while the run goes on."""
        job = self.job
        return job is not None and not job.done


_entries: collections.deque[Entry] = collections.deque(maxlen=_MOST_ENTRIES)


def add(job: Job) -> None:
    """Add a run. Replaces another job of the same running run, such as one that was attached before."""
    for entry in [entry for entry in _entries if entry.is_running and entry.id == job.id]:
        _entries.remove(entry)
    number = _entries[-1].number + 1 if _entries else 1
    began = job.folder.facts.began if isinstance(job, DetachedJob) else time.time()
    _entries.append(Entry(number, job.name, job.devices, began, job.ending, job.log_files, job.id, weakref.ref(job)))


def latest(count: int = 1) -> list[Entry]:
    """Return the running runs and the last ``count`` ended runs, in the order of their start."""
    entries = list(_entries)
    running = [entry.is_running for entry in entries]  # read once, since a run may end meanwhile
    ended = [index for index, is_running in enumerate(running) if not is_running][-count:]
    return [entry for index, entry in enumerate(entries) if running[index] or index in ended]


def find(which: str = "", *, running: bool = False) -> Entry:
    """Return a run by its name or number. Without either, return the only running run; if none runs, the last one.

    A number counts before a name. Of several runs with the name, return the running one; if none runs, the last one.

    Raises:
        NotebookAccelError: There is no such run, no running one although ``running`` asks for it, or several run.
    """
    numbered = [entry for entry in _entries if which == str(entry.number)]
    meant = numbered or [entry for entry in _entries if which in ("", entry.name)]
    going_on = [entry for entry in meant if entry.is_running]
    if len(going_on) > 1:
        if not which:
            raise NotebookAccelError("Several runs are in progress.", fix=f"name one with --run: {_listed(going_on)}")
        numbers = " or ".join(f"--run {entry.number}" for entry in going_on)
        raise NotebookAccelError(
            f"Several runs named {which!r} are in progress.",
            fix=f"{numbers}; %distributed status shows when each began",
        )
    if going_on or (meant and not running):
        return (going_on or meant)[-1]
    raise _nothing_found(which, has_ended=bool(meant), running=running)


def _nothing_found(which: str, *, has_ended: bool, running: bool) -> NotebookAccelError:
    named, in_progress = f" {which!r}" if which else "", " in progress" if running else ""
    if detached := _detached_names(which, running=running):
        return NotebookAccelError(
            f"There is no run{named}{in_progress} in this notebook.",
            why=f"This notebook isn't attached to the detached run {' or '.join(map(repr, detached))}.",
            fix=" or ".join(f"%distributed attach {shlex.quote(name)}" for name in detached),
        )
    others = [entry for entry in _entries if entry.is_running or not running] if which else []
    fix = f"name one of: {_listed(others)}" if others else "start one, with %%distributed or notebook_launcher"
    if which and has_ended:
        shown = f"%distributed status --run {shlex.quote(which)} shows how it ended"
        return NotebookAccelError(f"The run{named} has ended.", fix=fix if others else shown)
    return NotebookAccelError(f"There is no run{named}{in_progress}.", fix=fix)


def _listed(entries: Iterable[Entry]) -> str:
    return ", ".join(f"{entry.number} ({entry.name})" for entry in entries)


def _detached_names(which: str, *, running: bool) -> list[str]:
    """Return the names of this user's detached runs that a caller may mean: all that go on, or those of this name."""
    with contextlib.suppress(NotebookAccelError):
        named = [folder for folder in run_folders.every() if folder.is_called(which)]
        if running or not which:
            named = [folder for folder in named if folder.is_held and not detached_runs.is_ending(folder)]
        return list(dict.fromkeys(folder.facts.name for folder in named))
    return []
