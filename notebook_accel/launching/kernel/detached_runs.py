"""Summaries of this user's detached runs, and a warning about those that go on."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import time

from notebook_accel.errors import NotebookAccelError, SupervisorLostError
from notebook_accel.launching import run_folders
from notebook_accel.launching.kernel.detached_job import DetachedJob, open_job
from notebook_accel.launching.kernel.detached_link import Link
from notebook_accel.launching.run_folders import LATEST, RunFolder


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """One line about a detached run. Times are in seconds since the epoch.

    Attributes:
        status: A job's status as one word, ``lost`` if the agent was killed or has gone with the machine, or
            ``unreadable``.
        why: The reason of the run's end, in one line; empty if there is none.
        changed: Time of the run's last message.
        step: The most steps that a rank has done, ``None`` if no rank counts any.
        metrics: The latest metrics of the first rank that has some.
        log_folder: The folder of the logs; empty if there is none.
        session: For a session that goes on, its ranks' activity, such as ``idle`` or ``busy with In[7]``; else empty.
        session_since: Time at which this activity began.
    """

    id: str
    name: str
    status: str
    why: str
    began: float
    changed: float
    devices: str
    step: int | None
    metrics: dict[str, float]
    folder: str
    log_folder: str
    session: str = ""
    session_since: float = 0.0

    @property
    def state(self) -> str:
        """The status; for a session that goes on, its ranks' activity."""
        return f"session, {self.session}" if self.session else self.status

    @property
    def since(self) -> float:
        """Time at which the run entered its ``state``; for a running run, time of the launch."""
        return self.session_since or (self.began if self.status in ("starting", "running") else self.changed)


def summaries() -> list[RunSummary]:
    """Return this user's detached runs on this machine, the oldest first. Raises as ``run_folders.every`` does."""
    return [summary(folder) for folder in run_folders.every()]


def summary(folder: RunFolder) -> RunSummary:
    """Return the summary of a run."""
    facts = folder.facts
    step, metrics, status, why, session, session_since = None, {}, "unreadable", "", "", 0.0
    try:
        job = _job_of_latest(folder)
    except (NotebookAccelError, OSError) as error:
        why = error.what if isinstance(error, NotebookAccelError) else str(error)
    else:
        status = "lost" if isinstance(job.error, SupervisorLostError) else job.status
        why = job.ending.why
        step = max((rank.steps for rank in job.ranks if rank.steps is not None), default=None)
        metrics = next((dict(rank.metrics) for rank in job.ranks if rank.metrics), {})
        if facts.is_session and not job.done:
            session = job.doing() or "starting"
            since_s = max((rank.cell_since_s for rank in job.ranks if rank.cell_since_s is not None), default=None)
            session_since = facts.began + (0.0 if since_s is None else since_s - facts.began_s)
    return RunSummary(
        id=folder.id,
        name=facts.name,
        status=status,
        why=why,
        began=facts.began,
        changed=folder.changed,
        devices=facts.devices,
        step=step,
        metrics=metrics,
        folder=str(folder.path),
        log_folder=facts.log_folder,
        session=session,
        session_since=session_since,
    )


def _job_of_latest(folder: RunFolder) -> DetachedJob:
    """Return the job of a run with its present state but without its history."""
    job = open_job(folder, has_results=False)
    was_held = folder.is_held  # checked before reading, since the agent writes its last message before it ends
    with contextlib.suppress(FileNotFoundError):
        Link(job).replay(LATEST)
    if not job.done and not was_held:  # a full disk may have cut off the latest messages
        job = open_job(folder, has_results=False)
        Link(job).replay_to_its_end()
    return job


def is_ending(folder: RunFolder) -> bool:
    """Return whether a run is over, while its agent lives for a moment more."""
    with contextlib.suppress(NotebookAccelError, OSError):
        return folder.is_held and _job_of_latest(folder).done
    return False


def going_in_words() -> str:
    """Return a line that names this user's detached runs that go on; empty if there are none, or none can be read."""
    going: list[RunFolder] = []
    with contextlib.suppress(NotebookAccelError):
        going = [folder for folder in run_folders.every() if folder.is_held]
    if not going:
        return ""
    named = ", ".join(map(_in_words, going))
    name = shlex.quote(going[0].facts.name) if len(going) == 1 else "NAME"
    return (
        f"{'A detached run' if len(going) == 1 else f'{len(going)} detached runs'} of yours "
        f"{'goes' if len(going) == 1 else 'go'} on: {named}. %distributed attach {name} brings "
        f"{'it' if len(going) == 1 else 'one'} here; %distributed runs, or notebook-accel runs, tells more."
    )


def _in_words(folder: RunFolder) -> str:
    facts = folder.facts
    if not facts.is_session:
        return f"{facts.name} (on {facts.devices})"
    found = summary(folder)
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.since))
    return f"{facts.name} (a session on {facts.devices}, {found.session or found.status} since {since})"
