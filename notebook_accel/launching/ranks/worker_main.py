"""The ``__main__`` of a process that a rank's multiprocessing has started by spawn or forkserver.

multiprocessing runs this under the name ``__mp_main__``, and looks up objects of the rank's ``__main__`` in the
resulting namespace. Of a cell, only imports, definitions and constants run again.
"""

from __future__ import annotations

import contextlib
import os

from notebook_accel.launching.ranks import store, streams, worker
from notebook_accel.launching.ranks.import_hooks import when_imported
from notebook_accel.launching.spec import JobSpec, definitions
from notebook_accel.payload import memory_files


def _fill(namespace: dict[str, object]) -> None:
    descriptor = os.open(os.environ[worker.NAMESPACE_VARIABLE], os.O_RDONLY | os.O_CLOEXEC)
    try:
        spec = JobSpec.decode(memory_files.read_head(descriptor))
        worker.open_namespace(spec, descriptor, namespace)
    finally:
        os.close(descriptor)
    if spec.cell is not None:
        for code in definitions(spec.cell, spec.cell_filename):
            # A definition that needs a statement left out here fails; only code that uses it will miss it.
            with contextlib.suppress(Exception):
                exec(code, namespace)


if __name__ == "__mp_main__":
    streams.replace_streams()
    when_imported("multiprocessing.resource_tracker", worker.track_what_is_made_here)
    when_imported("torch.distributed.rendezvous", store.use)
    _fill(globals())
