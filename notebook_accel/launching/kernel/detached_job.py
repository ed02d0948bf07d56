"""The kernel's job of a detached run, which was launched here or is opened from the run's folder."""

from __future__ import annotations

import functools
import os
import pathlib
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from notebook_accel import VERSION
from notebook_accel import config as configuration
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import NotebookAccelError, RunError
from notebook_accel.launching import logs
from notebook_accel.launching.kernel.job import Job, LaunchRequest
from notebook_accel.launching.ranks.worker import Target
from notebook_accel.launching.results import ResultFile
from notebook_accel.launching.run_folders import JOURNAL_VERSION, PAYLOAD, RunFolder
from notebook_accel.launching.spec import JobSpec
from notebook_accel.payload import memory_files, serialization


class DetachedJob(Job):
    """The handle of a detached run. Several kernels may have one for the same run.

    Attributes:
        folder: The run's folder.
        is_live: True while messages come directly from the agent; false while the journal is read.
        leave: Ends this job, while the run goes on.
    """

    leave: Callable[[], None]

    def __init__(self, request: LaunchRequest, *, folder: RunFolder, **arguments: Any) -> None:
        super().__init__(request, **arguments)
        self.id = folder.id
        self.folder = folder
        self.is_live = True

    def pull(self, *names: str) -> Any:
        """Wait for the run's end, and return the final values of variables in rank 0.

        Args:
            names: Names that were given to ``--pull`` at the launch.

        Returns:
            The value; a tuple of the values for several names.

        Raises:
            NotebookAccelError: A name was not given to ``--pull``, or has no value that can be read here, or the run's
                folder was removed.
        """
        kept = self.spec.pull
        unknown = [name for name in names if name not in kept]
        if unknown or not names:
            raise NotebookAccelError(
                f"The run {self.name!r} keeps no variable {' or '.join(unknown)}.".replace(" variable .", " variable."),
                why=f"It was launched with --pull {','.join(kept)}." if kept else "It has no --pull.",
                fix="name the variables with --pull when you launch",
            )
        self.wait()
        try:
            descriptor = self.folder.open_result(0)
        except FileNotFoundError:
            raise NotebookAccelError(
                f"The variables of the run {self.name!r} are gone.", why=f"Its folder {self.folder.path} was removed."
            ) from None
        try:
            file = ResultFile(descriptor, 0)
            file.unpickle(self.result_files.by_value)
        finally:
            os.close(descriptor)
        for name in names:
            if name in file.problems:
                raise file.problems[name]
            if name not in file.values:
                raise RunError(f"The run {self.name!r} has left no value of {name!r}.", why=str(self.error or ""))
        values = tuple(file.values[name] for name in names)
        return values[0] if len(values) == 1 else values

    def _now_s(self) -> float:
        if self.is_live:
            return super()._now_s()
        return max((rank.last_event_s or self.started_s for rank in self.state.ranks), default=self.started_s)


def new_detached_job(request: LaunchRequest, folder: RunFolder, by_value: Sequence[Any]) -> DetachedJob:
    """Create the job of a run that is about to be launched, with the folder's files for results and logs."""
    log_folder: pathlib.Path | None = folder.log_folder
    if request.config.log_dir:
        log_folder = logs.make_folder(request.config.log_dir, request.spec.name)
    else:
        folder.log_folder.mkdir(mode=0o700)
    results = [folder.create_result(rank) for rank in range(request.spec.world_size)]
    return DetachedJob(request, folder=folder, by_value=by_value, result_files=results, log_folder=log_folder)


def open_job(
    folder: RunFolder, set_variables: Callable[[dict[str, Any]], object] | None = None, *, has_results: bool = True
) -> DetachedJob:
    """Create the job of a run, without any messages yet.

    Raises:
        NotebookAccelError: The folder can't be read, or has the format of another version.
    """
    request, facts = request_of(folder, set_variables), folder.facts
    job = DetachedJob(
        request,
        folder=folder,
        by_value=Definitions(folder),
        result_files=[folder.open_result(rank) for rank in range(facts.world_size)] if has_results else [],
        log_folder=pathlib.Path(facts.log_folder) if facts.log_folder else None,
    )
    job.started_s = facts.began_s
    if facts.is_session:
        job.expect_steps([])
        job.doing = lambda: job.state.serving
    return job


def request_of(folder: RunFolder, set_variables: Callable[[dict[str, Any]], object] | None = None) -> LaunchRequest:
    """Return the launch request of a run without its target, which is in the payload.

    Raises:
        NotebookAccelError: The folder can't be read, or has the format of another version.
    """
    facts = folder.facts
    if facts.journal_version != JOURNAL_VERSION:
        raise NotebookAccelError(
            f"The run {facts.name!r} can't be read by notebook-accel {VERSION}.",
            why=f"notebook-accel {facts.version} has launched it, and writes its folder in another format "
            f"({facts.journal_version} instead of {JOURNAL_VERSION}).",
            fix=f"attach with notebook-accel {facts.version}; "
            f"notebook-accel stop {shlex.quote(facts.name)} works with any",
        )
    payload = folder.open(PAYLOAD)
    try:
        spec = JobSpec.decode(memory_files.read_head(payload))
    finally:
        os.close(payload)
    known = {option.name for option in configuration.fields()}
    config = LaunchConfig().replace(**{name: value for name, value in facts.config.items() if name in known})
    return LaunchRequest(
        Target(names={}),
        {},
        spec,
        config,
        devices=facts.devices,
        set_variables=set_variables,
        on_death="keep" if facts.is_session else "stop",
        detach=True,
    )


class Definitions(Sequence[Any]):
    """The functions and classes that a run's payload holds by value. The payload is opened at the first access."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    @functools.cached_property
    def _loaded(self) -> list[Any]:
        namespace: dict[str, Any] = {}
        descriptor = self._folder.open(PAYLOAD)
        try:
            opened = serialization.load(descriptor, namespace=namespace)
        finally:
            os.close(descriptor)
        namespace.update({name: obj for name, obj in opened.by_value if name is not None})
        if not self._folder.facts.has_payload:
            return list(opened.value)
        namespace.update(opened.value.names)
        return [obj for _, obj in opened.by_value]

    def __getitem__(self, index: Any) -> Any:
        return self._loaded[index]

    def __len__(self) -> int:
        return len(self._loaded)
