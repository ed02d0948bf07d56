"""The kernel's side of detached runs, which go on when the kernel ends: launching, finding, and attaching to them.

A detached run has its own agent, a daemon, and a folder (``run_folders``). The launching kernel is the first that is
attached; others connect through the folder's socket. All get the same stream: the journal from its beginning, then the
agent's new messages. So an attached job equals a launched one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from notebook_accel import VERSION, interrupts
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, LaunchError, NotebookAccelError, PayloadError, PreflightError, RunError
from notebook_accel.launching import run_folders
from notebook_accel.launching.kernel import detached_runs, foreground, local, preflight, registry, run_payload
from notebook_accel.launching.kernel.detached_job import (
    Definitions,
    DetachedJob,
    new_detached_job,
    open_job,
    request_of,
)
from notebook_accel.launching.kernel.detached_link import Link, send_order
from notebook_accel.launching.kernel.job import Job, LaunchRequest
from notebook_accel.launching.run_folders import JOURNAL_VERSION, PAYLOAD, RunFacts, RunFolder
from notebook_accel.payload import serialization
from notebook_accel.protocol import agent_messages as messages

_PAUSE_S = 0.1
_START_DEADLINE_S = 60.0
_STOP_DEADLINE_S = 30.0
_LEAVE_DEADLINE_S = 12.0  # an agent waits 10 s for a kernel that reads nothing


def launch(request: LaunchRequest) -> Job:
    """Start the ranks of a run that goes on when the kernel ends, and return its job."""
    if why := why_not(request.config):
        raise ConfigError("This run can't be detached.", why=why, fix="leave out --detach (detach=True)")
    preflight.warn(preflight.check_detached())
    request, pickled = run_payload.pickle_target(request)
    is_fixed = bool(request.config.name)
    with (
        _new_folder(request.spec.name, request.detached_id, is_fixed=is_fixed) as (folder, lock, release),
        run_payload.prepared_run(_renamed(request, folder.name), pickled, folder=folder) as (job, payload),
    ):
        assert isinstance(job, DetachedJob)
        _start(job, payload, lock, release)
    return job


def _start(job: DetachedJob, payload: int, lock: int, release: Callable[[], None]) -> None:
    """Start a run that leaves this process at once, and attach to it. ``release`` closes the lock here."""
    job.folder.write_facts(_facts(job, job.name))
    local.engine().launch_detached(job, payload, lock)
    release()
    Link(job).attach()


def _renamed(request: LaunchRequest, name: str) -> LaunchRequest:
    return dataclasses.replace(request, spec=msgspec.structs.replace(request.spec, name=name))


@contextlib.contextmanager
def _new_folder(
    name: str, run_id: str = "", *, is_fixed: bool = True
) -> Iterator[tuple[RunFolder, int, Callable[[], None]]]:
    """Make the folder of a new run. Remove it on leaving if no agent has taken over the launch.

    Yields:
        The folder, the descriptor that holds its lock, and a function that closes the descriptor in this process.
    """
    run_folders.remove_old()
    for earlier in run_folders.every():
        if earlier.name == name:
            _wait_if_ending(earlier)
    folder, lock = run_folders.make(name, run_id, is_fixed=is_fixed)
    with contextlib.ExitStack() as held:
        held.callback(os.close, lock)
        try:
            yield folder, lock, held.close
        finally:
            if not folder.is_published:
                folder.remove()


def detach(job: Job, name: str = "") -> DetachedJob:
    """Detach a running run, so that it outlives this process as if it had been launched with ``detach=True``.

    The job ends with the status ``detached``. The run's new job has the curves so far, and everything from then on.

    Args:
        job: The run's job, in the foreground or the background.
        name: Name of the detached run. Default: the run's name, with a number if another run has that name and none was
            given.

    Returns:
        The run's new job.

    Raises:
        ConfigError: A run with these options can't be detached, a detached run would get another name, or no run can
            have this name.
        LaunchError: A detached run of the given name goes on already, or the folder can't be made.
        RunError: The run has ended or was detached, or another run of this process goes on.
    """
    folder = let_go(job, name)
    return job if isinstance(job, DetachedJob) else attach(folder.id)


def let_go(job: Job, name: str = "", *, is_session_told: bool = False) -> RunFolder:
    """Detach a run as ``detach`` does, without attaching to it, and return its folder.

    A session's ranks also need a message, which its pool sends: see ``RankPool.leave``.
    """
    if isinstance(job, DetachedJob):
        if name and name != job.name:
            raise ConfigError(f"The detached run {job.name!r} keeps its name.", fix="%distributed detach")
        return job.folder
    if job.status == "detached" and job.error is not None:
        raise job.error
    LaunchConfig().replace(name=name)  # refuses a name that no launch may have
    if why := why_not(job.config):
        raise ConfigError(f"The run {job.name!r} can't be detached.", why=why)
    if job.on_death == "keep" and not is_session_told:
        raise ConfigError(
            f"{job.name!r} is a session, which is detached as a whole.", fix="%distributed detach, or session.leave()"
        )
    deadline_s = time.monotonic() + _START_DEADLINE_S
    while job.status == "starting" and time.monotonic() < deadline_s:
        job.wait(_PAUSE_S)
    preflight.warn(preflight.check_detached())
    with interrupts.held():
        folder = _detach(job, name)
    with contextlib.suppress(Exception):  # the run is detached already, so a failure here doesn't matter
        local.engine().warm_in_kernel()  # the run has taken its agent and template along
    return folder


def _detach(job: Job, name: str) -> RunFolder:
    is_fixed = bool(name or job.config.name)
    with _new_folder(name or job.name, job.id, is_fixed=is_fixed) as (folder, lock, _):
        try:
            folder.write_facts(msgspec.structs.replace(_facts(job, folder.name), has_payload=False))
            _write_definitions(job, folder)
            for rank in range(job.world_size):
                os.close(folder.create_result(rank))
        except OSError as error:
            raise LaunchError(
                f"The folder {folder.path} for the detached run can't be written: {error.strerror}. "
                f"The run {job.name!r} goes on as before.",
                fix="set XDG_STATE_HOME to a folder of yours on a local disk with room",
            ) from None
        local.engine().detach(job, folder, lock)
    return folder


def _write_definitions(job: Job, folder: RunFolder) -> None:
    """Write the notebook's functions and classes, which results refer to, in place of the payload."""
    namespace = sys.modules["__main__"].__dict__
    try:
        pickled = serialization.pickle_by_value(tuple(job.result_files.by_value), roots={}, namespace=namespace)
    except PayloadError:  # they have changed since the launch: results that refer to them can't be read elsewhere
        pickled = serialization.pickle_by_value((), roots={})
    payload = folder.create(PAYLOAD)
    try:
        serialization.dump(payload, pickled, msgspec.structs.replace(job.spec, name=folder.name, authkey=b"").encode())
    finally:
        os.close(payload)


def pulled_names(folder: RunFolder) -> tuple[str, ...]:
    """Return the names that a run was launched with ``--pull`` for; none if its payload can't be read."""
    with contextlib.suppress(NotebookAccelError, OSError):
        return tuple(request_of(folder).spec.pull)
    return ()


def why_not(config: LaunchConfig) -> str:
    """Return the reason why a run with these options can't outlive its kernel; empty if it can."""
    if config.start_method in ("fork", "inline"):
        return f"With start_method={config.start_method!r} its ranks would be the kernel or forks of it."
    if config.num_nodes > 1:
        return "Runs on several nodes end with the kernels that have launched them."
    if config.engine != "local":
        return f"Ranks of the engine {config.engine!r} end with the kernel."
    return ""


def _facts(job: Job, name: str) -> RunFacts:
    defaults = msgspec.to_builtins(LaunchConfig())
    options = msgspec.to_builtins(job.config)
    return RunFacts(
        name=name,
        world_size=job.world_size,
        devices=job.devices,
        config={name: value for name, value in options.items() if value != defaults[name]},
        log_folder="" if job.log_folder is None else str(job.log_folder),
        began=time.time() - (time.monotonic() - job.started_s),
        began_s=job.started_s,
        keep_days=job.config.keep_days,
        version=VERSION,
        journal_version=JOURNAL_VERSION,
        host=socket.gethostname(),
        boot_id=run_folders.boot_id(),
        is_session=job.on_death == "keep",
    )


def attach(which: str = "", *, view: str | None = None) -> DetachedJob:
    """Attach to a detached run of yours on this machine, and show it as the launching notebook does.

    Args:
        which: The run's name or id. Default: the only run that goes on, or the latest.
        view: View of the run: ``auto``, ``panel``, ``lines`` or ``none``. Default: that of the launch.

    Returns:
        The run's job, with the results if the run has ended.

    Raises:
        NotebookAccelError: There is no such run, or a version with another format has launched it.
        RunError: The run's agent lives but doesn't answer.
    """
    return attach_and_show(which, view=view)


def attach_and_show(
    which: str = "",
    *,
    view: str | None = None,
    set_variables: Callable[[dict[str, Any]], object] | None = None,
    show: Callable[[Job], None] = foreground.draw_attached,
) -> DetachedJob:
    """Attach to a run, as ``attach`` does. ``show`` shows it; ``set_variables`` is as in ``LaunchRequest``."""
    job = open_job(run_folders.find(which), set_variables)
    if view is not None:
        job.config = job.config.replace(view=view)
    with interrupts.held():
        Link(job).attach()
        registry.add(job)
        show(job)
    return job


def again(
    which: str = "",
    *,
    set_variables: Callable[[dict[str, Any]], object] | None = None,
    show: Callable[[Job], None] = foreground.draw_in_background,
) -> DetachedJob:
    """Launch an ended detached run, by default the latest, again: the same code, with the variables sent then.

    Raises:
        LaunchError: The run goes on, or this machine can't run the launch.
        NotebookAccelError: There is no such run, or a version with another format has launched it.
    """
    earlier = run_folders.find(which)
    typed = shlex.quote(earlier.facts.name)
    _wait_if_ending(earlier)
    if earlier.is_held:
        raise LaunchError(
            f"The run {earlier.facts.name!r} goes on.", fix=f"%distributed attach {typed}; notebook-accel stop {typed}"
        )
    if earlier.facts.is_session:
        raise LaunchError(
            f"{earlier.facts.name!r} is a session that has ended, and its cells weren't kept.",
            fix=f"%distributed start --detach --name {typed}, and run the cells again",
        )
    if not earlier.facts.has_payload:
        raise LaunchError(
            f"The run {earlier.facts.name!r} can't be launched again from here.",
            why="It was detached while it went on, and what was sent to its ranks wasn't kept.",
            fix="run its cell again, with --detach",
        )
    request = request_of(earlier, set_variables)
    findings = preflight.check(request.config)
    if any(finding.refuses for finding in findings):
        raise PreflightError(findings)
    preflight.warn((*findings, *preflight.check_detached()))
    return foreground.start_and_show(lambda: _launch_again(earlier, request), show)


def _launch_again(earlier: RunFolder, request: LaunchRequest) -> DetachedJob:
    with _new_folder(request.spec.name) as (folder, lock, release):
        os.link(earlier.path / PAYLOAD, folder.path / PAYLOAD)
        payload = folder.open(PAYLOAD)
        try:
            job = new_detached_job(request, folder, Definitions(folder))
            _start(job, payload, lock, release)
        finally:
            os.close(payload)
    registry.add(job)
    return job


def _wait_if_ending(folder: RunFolder) -> None:
    """Wait for the agent of a run that is over, which holds the folder for a moment more."""
    deadline_s = time.monotonic() + _LEAVE_DEADLINE_S
    while detached_runs.is_ending(folder) and time.monotonic() < deadline_s:
        interrupts.check()
        time.sleep(_PAUSE_S)


def stop(folder: RunFolder, how: messages.How = "stop") -> None:
    """Stop or interrupt a run, and wait until its agent is gone.

    Raises:
        RunError: The agent is not gone in time.
    """
    send_order(folder, messages.End(job_id=folder.id, how=how))
    deadline_s = time.monotonic() + _STOP_DEADLINE_S + 3 * float(folder.facts.config.get("grace_s", 0.0))
    while folder.is_held:
        if time.monotonic() > deadline_s:
            raise RunError(f"The run {folder.facts.name!r} has not ended yet.", fix="try again")
        time.sleep(_PAUSE_S)
