"""The detached runs of this user: a line about each, and what people should know of those that go on."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pathlib
import subprocess
import time

from notebook_accel.errors import Finding, NotebookAccelError, SupervisorLostError
from notebook_accel.launching import run_folders
from notebook_accel.launching.kernel.detached_job import DetachedJob, open_job
from notebook_accel.launching.kernel.detached_link import Link
from notebook_accel.launching.run_folders import RunFolder

_LINGERING = pathlib.Path("/var/lib/systemd/linger")
_OWN_GROUP = pathlib.Path("/proc/self/cgroup")
_ASK_LOGIND = (
    *("busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1"),
    *("org.freedesktop.login1.Manager", "KillUserProcesses"),
)
_ANSWER_DEADLINE_S = 5.0


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """A detached run in a line.

    Attributes:
        id: Its id.
        name: Its name.
        status: A job's status in a word; ``lost`` if its agent has gone with the machine or was killed; ``unreadable``.
        why: The reason of its end in a line; empty if there is none.
        began: Time of its launch in seconds since the epoch.
        changed: Time of its last sign of life.
        devices: The ranks' devices in words.
        step: Steps of the rank that has done most, ``None`` if none counts any.
        metrics: The latest metrics of the first rank that has some.
        folder: Its folder, with results and logs.
        log_folder: The folder of the logs; empty if there is none.
        session: For a session that goes on, what its ranks do, such as ``idle`` or ``busy with In[7]``; else empty.
        session_since: Time since which they have done so.
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
    def is_going(self) -> bool:
        """True while the run goes on."""
        return self.status in ("starting", "running")

    @property
    def state(self) -> str:
        """The status; what the ranks do, for a session that goes on."""
        return f"session, {self.session}" if self.session else self.status

    @property
    def since(self) -> float:
        """Time since which it is in that state, or of its launch while it goes on."""
        return self.session_since or (self.began if self.is_going else self.changed)


def summaries() -> list[RunSummary]:
    """Return this user's detached runs on this machine, the oldest first."""
    return [summary(folder) for folder in run_folders.every()]


def summary(folder: RunFolder) -> RunSummary:
    """Return a run in a line."""
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
    """Return the job of a run with its present state and without its history."""
    job = open_job(folder, has_results=False)
    was_held = folder.is_held  # read before the messages, the last of which is written before the agent ends
    with contextlib.suppress(FileNotFoundError):
        link = Link(job)
        link.hear_history()
        link.hear(folder.open_latest())
    if not job.done and not was_held:  # the disk may have been full
        job = open_job(folder, has_results=False)
        link = Link(job)
        link.hear_history()
        link.hear(folder.open_journal())
        link.end_if_lost()
    return job


def going_in_words() -> str:
    """Return a line that names this user's detached runs that go on; empty if there are none."""
    going = [folder for folder in run_folders.every() if folder.is_held]
    if not going:
        return ""
    named = ", ".join(map(_in_words, going))
    return (
        f"{'A detached run' if len(going) == 1 else f'{len(going)} detached runs'} of yours "
        f"{'goes' if len(going) == 1 else 'go'} on: {named}. %distributed runs, or notebook-accel runs, tells more."
    )


def _in_words(folder: RunFolder) -> str:
    facts = folder.facts
    if not facts.is_session:
        return f"{facts.name} (on {facts.devices})"
    found = summary(folder)
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.since))
    return f"{facts.name} (a session on {facts.devices}, {found.session or found.status} since {since})"


def logout_findings() -> tuple[Finding, ...]:
    """Return a warning if systemd ends what this process starts when its user logs out."""
    with contextlib.suppress(OSError, KeyError):
        # Not imported at the top: Windows, where this module can be imported, lacks it.
        user = importlib.import_module("pwd").getpwuid(os.getuid()).pw_name
        group = _OWN_GROUP.read_text()
        if "/user.slice/" not in group or (_LINGERING / user).exists():
            return ()
        # What a session has started ends with it only if that is set. What the user's manager has started, as some
        # hubs have it start kernels, always ends with the user's last session.
        if "/session-" in group and not _kills_user_processes():
            return ()
        return (
            Finding(
                "systemd ends a detached run when you log out of this machine.",
                "This process belongs to your login there, and so does all that it starts.",
                f"loginctl enable-linger {user}, once, before you launch",
                refuses=False,
            ),
        )
    return ()


def _kills_user_processes() -> bool:
    """Return systemd's setting of that name."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(_ASK_LOGIND, capture_output=True, text=True, timeout=_ANSWER_DEADLINE_S, check=False)
        return asked.stdout.split() == ["b", "true"]
    return False
