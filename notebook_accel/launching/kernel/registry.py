"""The runs of this kernel by name and number, for callers that have no ``Job``."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pathlib
import shlex
import time
import weakref

from notebook_accel.errors import NotebookAccelError
from notebook_accel.launching import run_folders
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
    _entries.append(
        Entry(number, job.name, job.devices, time.time(), job.ending, job.log_files, job.id, weakref.ref(job))
    )


def latest(count: int = 1) -> list[Entry]:
    """Return the running runs and the last ``count`` ended runs, in the order of their start."""
    entries = list(_entries)
    running = [entry.is_running for entry in entries]  # read once, since a run may end meanwhile
    ended = [index for index, is_running in enumerate(running) if not is_running][-count:]
    return [entry for index, entry in enumerate(entries) if running[index] or index in ended]


def find(which: str = "", *, running: bool = False) -> Entry:
    """Return a run by its name or number. Without either, return the only running run; if none runs, the last one.

    Raises:
        NotebookAccelError: There is no such run, no running one although ``running`` asks for it, or more than one.
    """
    going_on = [entry for entry in _entries if entry.is_running]
    known = going_on if running else list(_entries)
    if which:
        found = [entry for entry in known if which in (str(entry.number), entry.name)]
        if found:
            return ([entry for entry in found if entry.is_running] or found)[-1]
    elif len(going_on) == 1 or (known and not going_on):
        return (going_on or known)[-1]
    detached = [] if going_on and not which else _detached_names(which, running=running)
    if detached:
        raise NotebookAccelError(
            f"There is no run{f' {which!r}' if which else ''}{' that goes on' if running else ''} in this notebook.",
            why=f"This notebook isn't attached to the detached run {' or '.join(map(repr, detached))}.",
            fix=" or ".join(f"%distributed attach {shlex.quote(name)}" for name in detached),
        )
    what = f"There is no run {which!r}" if which else "Several runs go on" if going_on else "There is no run"
    listed = ", ".join(f"{entry.number} ({entry.name})" for entry in (known if which else going_on))
    choice = f"name one {'of' if which else 'with --run'}: {listed}"
    raise NotebookAccelError(
        f"{what}{' that goes on' if running and (which or not going_on) else ''}.",
        fix=choice if listed else "start one, with %%distributed or notebook_launcher",
    )


def _detached_names(which: str, *, running: bool) -> list[str]:
    """Return the names of this user's detached runs that a caller may mean: all that go on, or those of this name."""
    with contextlib.suppress(NotebookAccelError):
        named = [folder for folder in run_folders.every() if not which or which in (folder.facts.name, folder.id)]
        meant = [folder for folder in named if folder.is_held or (which and not running)]
        return list(dict.fromkeys(folder.facts.name for folder in meant))
    return []
