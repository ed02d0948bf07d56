"""The private names of torch that this package uses, so that a new release of torch can break this module only.

No function imports torch, since the kernel's side calls some of them too. Unless a docstring says something else, the
names are in torch 2.9, the oldest that this package supports, up to 2.13. ``tests/test_torch_internals.py`` says which
of them the installed torch lacks.

Attributes of torch's objects stay where the object is handled: those of ``fully_shard`` in ``training/fsdp.py``, of
``GradScaler`` in ``training/precision.py``, of modules in ``training/compiling.py``, of loaders in
``training/loaders.py`` and ``launching/ranks/torch_hooks.py``. So do methods that subclasses override, and functions
that ``launching`` replaces. That test has their names too.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


def process_groups() -> list[Any]:
    """Return all process groups of this process in the order in which they were made.

    ``distributed_c10d._world.pg_map`` has them. They are watched, counted and aborted; torch documents no list of them.
    """
    return list(_c10d()._world.pg_map) if _c10d() else []


def ranks_of_groups() -> list[set[int]] | None:
    """Return the ranks of each process group, from ``distributed_c10d._world.pg_group_ranks``.

    ``None`` as long as that module isn't imported, or only in part.
    """
    world = getattr(_c10d(), "_world", None)
    return None if world is None else [set(ranks) for ranks in list(world.pg_group_ranks.values())]


def default_store() -> Any:
    """Return the store of the default group, by ``distributed_c10d._get_default_store``.

    A program that has made the group itself gives nobody else its store.
    """
    return _c10d()._get_default_store()


def abort_process_groups() -> None:
    """Destroy all groups without waiting for the GPU, by ``distributed_c10d._abort_process_group``."""
    _c10d()._abort_process_group()


def _c10d() -> Any:
    """Return the module, ``None`` until it is imported."""
    return sys.modules.get("torch.distributed.distributed_c10d")


def backend_for(group: Any, device: str) -> Any:
    """Return the object that carries a group's tensors on one type of device, by ``ProcessGroup._get_backend``.

    Deadlines and aborts belong to a group's backends.

    Raises:
        RuntimeError: The group has no backend for this type of device.
    """
    return group._get_backend(sys.modules["torch"].device(device))


def call_counts(group: Any) -> Iterator[int]:
    """Yield the numbers of collectives that a group's backends have begun.

    They are ``Backend._get_sequence_number_for_group``, for each of ``ProcessGroup._device_types``. Ranks that have
    begun different numbers would hang.
    """
    for device in sorted(group._device_types, key=str):
        with contextlib.suppress(RuntimeError):  # some backends, such as MPI's, don't count
            yield group._get_backend(device)._get_sequence_number_for_group()


def set_deadline(backend: Any, deadline: Any) -> None:
    """Set the deadline of a gloo backend's further collectives, by ``ProcessGroupGloo._set_default_timeout``.

    The public argument ``timeout`` sets one deadline for all backends of a group.
    """
    backend._set_default_timeout(deadline)


@contextlib.contextmanager
def one_nccl_call(backend: Any) -> Iterator[None]:
    """Make NCCL take the calls in the body as one, by ``ProcessGroupNCCL._group_start`` and ``_group_end``.

    Otherwise communicators that are aborted one after the other wait for each other.
    """
    backend._group_start()
    try:
        yield
    finally:
        backend._group_end()


def last_collective() -> str:
    """Return the collective that this process has entered last: its number in its group, its name, the group's name.

    torch's flight recorder knows it, by ``_C._distributed_c10d._dump_fr_trace_json``. The text is empty if nothing was
    recorded, or this torch can't tell.
    """
    with contextlib.suppress(Exception):
        recorder = sys.modules["torch._C._distributed_c10d"]._dump_fr_trace_json
        recorded = json.loads(recorder(True, False)).get("entries", ())
        last = max((one for one in recorded if not one["is_p2p"]), key=lambda one: one["record_id"], default=None)
        if last is not None:
            name = last["profiling_name"].partition(":")[2]
            return f"{last['collective_seq_id']} {name} {last['process_group'][1]}"
    return ""


def nccl_status() -> dict[str, tuple[str, str]]:
    """Return, by group, the numbers of the last collectives that NCCL has enqueued and completed.

    They come from torch's flight recorder, by ``_C._distributed_c10d._dump_nccl_trace_json``, which is only in builds
    with NCCL; reading it makes no CUDA call. There are none where TORCH_FR_BUFFER_SIZE=0 turns the recorder off.
    """
    dump = getattr(sys.modules["torch"]._C._distributed_c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return {}
    try:
        groups = json.loads(dump(includeCollectives=False)).get("pg_status", {})
        return {
            group: (status["last_enqueued_collective"], status["last_completed_collective"])
            for group, status in groups.items()
        }
    except (RuntimeError, KeyError, TypeError, ValueError, AttributeError):  # another version of torch
        return {}


def flatten_mesh(mesh: Any, dimensions: Sequence[str], name: str) -> None:
    """Give several dimensions of a mesh one name together, by ``DeviceMesh._flatten``, as Accelerate does."""
    mesh[tuple(dimensions)]._flatten(name)


def root_mesh(mesh: Any) -> Any:
    """Return the mesh that a mesh was sliced from, or the mesh itself.

    By ``DeviceMesh._get_root_mesh``; in torch 2.9 by ``device_mesh._mesh_resources``.
    """
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    meshes: Any = importlib.import_module("torch.distributed.device_mesh")
    return meshes._mesh_resources.get_root_mesh(mesh)


def forget_meshes() -> None:
    """Clear torch's caches by mesh, which take meshes for equal although the group of one was destroyed.

    The cache in Python is reached by ``DTensor._op_dispatcher``, the one in C++, in releases after 2.9, by
    ``_C._clear_DTensor_sharding_propagator_cache``.
    """
    dispatcher: Any = importlib.import_module("torch.distributed.tensor").DTensor._op_dispatcher
    dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    getattr(sys.modules["torch"]._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def fully_shard_attributes() -> tuple[str, ...]:
    """Return the names under which ``fully_shard`` keeps its state in a module, so that a copy can go without it.

    They are in ``torch.distributed._composable.contract``; those of marks for the compiler have no names of their own.
    """
    contract: Any = importlib.import_module("torch.distributed._composable.contract")
    return contract.STATE_KEY, contract.REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"


def measure_exchanges(model: Any) -> None:
    """Make ``DistributedDataParallel`` measure each step, by ``_set_ddp_runtime_logging_sample_rate``."""
    model._set_ddp_runtime_logging_sample_rate(1)


def measured_exchange(model: Any) -> Mapping[str, int]:
    """Return what ``DistributedDataParallel`` has measured of a step, by its ``Logger._get_ddp_logging_data``."""
    measured: Mapping[str, int] = model.logger._get_ddp_logging_data().ints_map
    return measured


def parameter_parts(whole: Any, requires_grad: bool) -> tuple[Any, ...]:
    """Return what pickle makes a parameter with the data ``whole`` of: ``_utils._rebuild_parameter``, as torch does."""
    rebuild = sys.modules["torch"]._utils._rebuild_parameter
    return rebuild, (whole, requires_grad, collections.OrderedDict())


def parametrize(module: Any, names: Sequence[str]) -> None:
    """Make these attributes of a module computed ones again, as ``register_parametrization`` has made them.

    By ``parametrize._inject_new_class`` and ``_inject_property``, since the public function would also make parameters.
    """
    functions: Any = importlib.import_module("torch.nn.utils.parametrize")
    functions._inject_new_class(module)
    for name in names:
        functions._inject_property(module, name)


def after_backward(function: Callable[[], object]) -> None:
    """Call a function when the running backward pass ends, by ``Variable._execution_engine``, as torch's DDP does."""
    sys.modules["torch"].autograd.Variable._execution_engine.queue_callback(function)


def is_profiled() -> bool:
    """Return whether a profiler of torch runs, by ``autograd._profiler_enabled``; there can be only one."""
    return bool(sys.modules["torch"].autograd._profiler_enabled())


def is_memory_recorded() -> bool:
    """Return whether the allocator's only history is being recorded, by ``_C._cuda_isHistoryEnabled``."""
    return bool(sys.modules["torch"]._C._cuda_isHistoryEnabled())


def record_memory(most_entries: int) -> None:
    """Start recording the allocator's history, by ``cuda.memory._record_memory_history``, which torch documents."""
    options = {"context": "alloc", "stacks": "python", "max_entries": most_entries, "clear_history": True}
    sys.modules["torch"].cuda.memory._record_memory_history("all", **options)


def recorded_memory() -> Mapping[str, Any]:
    """Return the allocator's history, by ``cuda.memory._snapshot``, and stop recording it."""
    memory = sys.modules["torch"].cuda.memory
    snapshot: Mapping[str, Any] = memory._snapshot()
    memory._record_memory_history(None)
    return snapshot


def nvml_handle(device: Any) -> Any:
    """Return NVML's handle of a GPU of torch's numbering, by ``cuda._get_pynvml_handler``."""
    return sys.modules["torch"].cuda._get_pynvml_handler(device)


def bad_fork_check() -> Callable[[], bool] | None:
    """Return torch's function that tells a fork whether it can't use CUDA; ``None`` without CUDA, or without torch.

    It is ``_C._cuda_isInBadFork``.
    """
    check: Callable[[], bool] | None = getattr(getattr(sys.modules.get("torch"), "_C", None), "_cuda_isInBadFork", None)
    return check


def at_cuda_start(function: Callable[[], object]) -> None:
    """Call a function when torch initialises CUDA, by ``cuda._lazy_call``, whether that is now or later.

    torch may be half imported here, so any exception is possible.
    """
    sys.modules["torch.cuda"]._lazy_call(function)


def compiled_graphs() -> int:
    """Return the number of graphs that ``torch.compile`` has compiled here, by ``_dynamo.utils.counters``."""
    # Another thread may be importing the module at this moment.
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return 0 if counters is None else int(counters["stats"].get("unique_graphs", 0))


def last_recompilation() -> str:
    """Return why ``torch.compile`` has compiled its last graph anew; empty if it was the first of its code.

    By ``_dynamo.utils.get_compilation_metrics``.
    """
    try:
        reason: str | None = sys.modules["torch._dynamo.utils"].get_compilation_metrics()[-1].recompile_reason
    except Exception:  # noqa: BLE001 - another thread may be compiling, and another torch may lack it
        reason = None
    return reason or ""


def show_compile_times() -> None:
    """Have torch make its table of compile times at the exit, which takes 3 ms, only if a logger shows it.

    torch registers ``_dynamo.utils.dump_compile_times`` with ``atexit``, and logs with ``_dynamo.utils.log``.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    with contextlib.suppress(AttributeError):
        if dynamo is not None:
            atexit.unregister(dynamo.dump_compile_times)
            if dynamo.log.isEnabledFor(logging.INFO):
                atexit.register(dynamo.dump_compile_times)
