"""A launch's memory files: the sealed payload that every rank opens, and one file a rank for its result."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from notebook_accel.launching import logs
from notebook_accel.launching.kernel import sources
from notebook_accel.launching.kernel.engine import Request
from notebook_accel.launching.kernel.job import Job
from notebook_accel.payload import memory_files, serialization

__all__ = ["Sealed", "sealed"]


class Sealed(NamedTuple):
    """A run that is ready to be started.

    Attributes:
        job: Its handle, which owns the result files.
        payload: Descriptor of the payload, whose head is the ``JobSpec``.
        result_files: One empty memory file a rank; then, if they are wanted too, one for each rank of other nodes.
    """

    job: Job
    payload: int
    result_files: list[int]


@contextlib.contextmanager
def sealed(request: Request, pickled: serialization.Pickled, left_out: Mapping[str, str] = {}) -> Iterator[Sealed]:
    """Seals what is sent to the ranks. The payload is closed at the end; the job is killed if the start fails.

    Args:
        request: The launch.
        pickled: Its target.
        left_out: Names that stay behind, each with the reason.
    """
    spec = msgspec.structs.replace(
        request.spec,
        sources=sources.of_functions(pickled.shipped) | dict(request.spec.sources),
        left_out=dict(left_out),
    )
    payload = memory_files.memory_file("notebook-accel-payload")
    try:
        serialization.seal(payload, pickled, spec.encode())
        memory_files.make_unwritable(payload)
        nodes = int(request.config.num_nodes) if request.config.all_nodes else 1
        files = [memory_files.memory_file(f"notebook-accel-result-{rank}") for rank in range(nodes * spec.world_size)]
        job = request.make_job(
            spec,
            shipped=pickled.shipped,
            result_files=files,
            log_folder=logs.make_folder(request.config.log_dir, spec.name),
        )
        try:
            yield Sealed(job, payload, files)
        except BaseException:
            job.kill()
            raise
    finally:
        os.close(payload)
