"""Detached runs, which go on when the kernel ends: launching them, finding them, and attaching to them.

A detached run has an agent of its own, which is nobody's child, and a folder (``run_folders``). The launching kernel is
the first of those that are attached; the others come through the folder's socket. All get the same stream: the journal
from its beginning, then what the agent tells from there on. So a job that was attached is like one that was launched.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from notebook_accel import VERSION, uninterruptible
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, LaunchError, PreflightError, RunError
from notebook_accel.launching import logs, run_folders
from notebook_accel.launching.kernel import detached_runs, foreground, local, preflight, registry, run_payload
from notebook_accel.launching.kernel.detached_job import Definitions, DetachedJob, open_job, request_of
from notebook_accel.launching.kernel.detached_link import Link, send_order
from notebook_accel.launching.kernel.engine import LaunchRequest
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.kernel.run_payload import PreparedRun, RunFiles
from notebook_accel.launching.run_folders import JOURNAL_VERSION, RunFacts, RunFolder
from notebook_accel.payload import serialization
from notebook_accel.protocol import agent_messages as messages

_PAUSE_S = 0.1
_STOP_DEADLINE_S = 30.0


class DetachedEngine:
    """Launches runs that go on when the kernel ends."""

    def launch(self, request: LaunchRequest) -> Job:
        """Start the ranks and return the run's job. See ``Engine``."""
        _refuse_what_cannot_be(request)
        preflight.warn(detached_runs.logout_findings())
        local.check_size(request.spec.world_size)
        pickled, unsent = run_payload.pickle_target(request.target, request.roots, request.optional_names)
        return uninterruptible.call(
            lambda: self._launch(request, pickled, unsent), Job.discard, request.foreground_lock
        )

    def _launch(self, request: LaunchRequest, pickled: serialization.Pickled, unsent: Mapping[str, str]) -> DetachedJob:
        with _new_folder(request.spec.name, is_unique=bool(request.config.name)) as (folder, lock, release):

            def make_job(request: LaunchRequest, **arguments: Any) -> DetachedJob:
                return DetachedJob(request, folder=folder, **arguments)

            files = _FolderFiles(folder)
            with run_payload.prepared_run(request, pickled, unsent, files=files, make_job=make_job) as prepared:
                assert isinstance(prepared.job, DetachedJob)
                folder.write_facts(_facts(prepared.job, request))
                Link(prepared.job).launch(prepared, lock, release)
        return prepared.job


@contextlib.contextmanager
def _new_folder(name: str, *, is_unique: bool) -> Iterator[tuple[RunFolder, int, Callable[[], None]]]:
    """Make the folder of a new run. Remove it on leaving if no agent has taken over the launch.

    Yields:
        The folder, the descriptor that holds its lock, and a function that closes the descriptor here.
    """
    run_folders.remove_old()
    folder, lock = run_folders.make(name, is_unique=is_unique)
    with contextlib.ExitStack() as held:
        held.callback(os.close, lock)
        try:
            yield folder, lock, held.close
        finally:
            if not folder.is_published:
                folder.remove()


class _FolderFiles(RunFiles):
    """The files of a detached run, in its folder."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def open_payload(self) -> int:
        return self._folder.create_payload()

    def seal_payload(self, payload: int) -> None:
        """Do nothing: only a memory file can be sealed."""

    def open_result(self, rank: int) -> int:
        return self._folder.create_result(rank)

    def log_folder(self, log_dir: str, name: str) -> pathlib.Path | None:
        if log_dir:
            return logs.make_folder(log_dir, name)
        self._folder.log_folder.mkdir(mode=0o700)
        return self._folder.log_folder


def _refuse_what_cannot_be(request: LaunchRequest) -> None:
    config = request.config
    why = ""
    if config.start_method in ("fork", "inline"):
        why = f"With start_method={config.start_method!r} its ranks would be the kernel or forks of it."
    elif config.num_nodes != "1":
        why = "Runs on several nodes end with the kernels that have launched them."
    elif config.engine != "local":
        why = f"Ranks of the engine {config.engine!r} end with the kernel."
    elif request.on_death == "keep":
        why = "A session's ranks take their cells from the kernel."
    if why:
        raise ConfigError("This run can't be detached.", why=why, fix="leave out --detach (detach=True)")


def _facts(job: DetachedJob, request: LaunchRequest) -> RunFacts:
    defaults = msgspec.to_builtins(LaunchConfig())
    options = msgspec.to_builtins(request.config)
    return RunFacts(
        name=job.name,
        world_size=job.world_size,
        devices=job.devices,
        config={name: value for name, value in options.items() if value != defaults[name]},
        log_folder="" if job.log_folder is None else str(job.log_folder),
        began=time.time(),
        began_s=job.started_s,
        keep_days=request.config.keep_days,
        version=VERSION,
        journal_version=JOURNAL_VERSION,
        host=socket.gethostname(),
        boot_id=run_folders.boot_id(),
    )


def attach(which: str = "", *, view: str | None = None) -> DetachedJob:
    """Attach to a detached run of yours on this machine, and show it as the launching notebook does.

    Args:
        which: The run's name or id. Default: the only one that goes on, or the latest.
        view: View of the run: ``auto``, ``panel``, ``lines`` or ``none``. Default: that of the launch.

    Returns:
        The run's job. If the run has ended, it has the results already.

    Raises:
        NotebookAccelError: There is no such run, or a version with another format has launched it.
        RunError: The run's agent lives and doesn't answer.
    """
    return attach_and_show(which, view=view)


def attach_and_show(
    which: str = "",
    *,
    view: str | None = None,
    set_variables: Callable[[dict[str, Any]], object] | None = None,
    show: Callable[[Job], None] = foreground.draw_attached,
) -> DetachedJob:
    """Attach to a run, as ``attach`` does.

    Args:
        which: The run's name or id.
        view: View of the run.
        set_variables: Takes the pulled variables when the results are read.
        show: Shows the run.
    """
    job = open_job(run_folders.find(which), set_variables)
    if view is not None:
        job.config = job.config.replace(view=view)
    uninterruptible.call(Link(job).attach)
    registry.add(job)
    show(job)
    return job


def again(
    which: str = "",
    *,
    set_variables: Callable[[dict[str, Any]], object] | None = None,
    show: Callable[[Job], None] = foreground.draw_in_background,
) -> DetachedJob:
    """Launch a detached run that has ended once more: the same code with the variables that were sent then.

    Args:
        which: The run's name or id. Default: the latest.
        set_variables: Takes the pulled variables when the results are read.
        show: Shows the run.

    Raises:
        LaunchError: The run goes on, or this machine can't run the launch.
        NotebookAccelError: There is no such run, or a version with another format has launched it.
    """
    earlier = run_folders.find(which)
    if earlier.is_held:
        name = earlier.facts.name
        raise LaunchError(f"The run {name!r} goes on.", fix=f"%distributed attach {name}; notebook-accel stop {name}")
    request = request_of(earlier, set_variables)
    findings = preflight.check(request.config)
    if any(finding.refuses for finding in findings):
        raise PreflightError(findings)
    preflight.warn((*findings, *detached_runs.logout_findings()))
    job = uninterruptible.call(lambda: _launch_again(earlier, request), Job.discard)
    registry.add(job)
    show(job)
    return job


def _launch_again(earlier: RunFolder, request: LaunchRequest) -> DetachedJob:
    with _new_folder(request.spec.name, is_unique=True) as (folder, lock, release):
        payload = folder.take_payload_of(earlier)
        try:
            results = [folder.create_result(rank) for rank in range(request.spec.world_size)]
            log_folder = _FolderFiles(folder).log_folder(request.config.log_dir, request.spec.name)
            job = DetachedJob(
                request, folder=folder, by_value=Definitions(folder), result_files=results, log_folder=log_folder
            )
            folder.write_facts(_facts(job, request))
            Link(job).launch(PreparedRun(job, payload, results), lock, release)
        finally:
            os.close(payload)
    return job


def stop(folder: RunFolder) -> None:
    """Stop a run, and wait until its agent is gone.

    Raises:
        RunError: It is not gone in time.
    """
    send_order(folder, messages.End(job_id=folder.id, how="stop"))
    deadline_s = time.monotonic() + _STOP_DEADLINE_S + 3 * float(folder.facts.config.get("grace_s", 0.0))
    while folder.is_held:
        if time.monotonic() > deadline_s:
            raise RunError(f"The run {folder.facts.name!r} has not ended yet.", fix="try again")
        time.sleep(_PAUSE_S)
