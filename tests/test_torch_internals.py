"""torch's private names: the installed torch has those that the package uses, and only one module reaches for them."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from notebook_accel import torch_internals

_ROOT = pathlib.Path(torch_internals.__file__).parent
# Those of ``torch_internals``, in its order, but what only other builds or releases have.
_OWN = [
    "torch.distributed.distributed_c10d._world.pg_map",
    "torch.distributed.distributed_c10d._world.pg_group_ranks",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._abort_process_group",
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.ProcessGroup._device_types",
    "torch._C._distributed_c10d.Backend._get_sequence_number_for_group",
    "torch.distributed.ProcessGroupGloo._set_default_timeout",
    "torch._C._distributed_c10d._dump_fr_trace_json",
    "torch.distributed.device_mesh.DeviceMesh._flatten",
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh",
    "torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear",
    "torch._C._clear_DTensor_sharding_propagator_cache",
    "torch.distributed._composable.contract.STATE_KEY",
    "torch.distributed._composable.contract.REGISTRY_KEY",
    "torch.nn.parallel.DistributedDataParallel._set_ddp_runtime_logging_sample_rate",
    "torch._C._distributed_c10d.Logger._get_ddp_logging_data",
    "torch._utils._rebuild_parameter",
    "torch.nn.utils.parametrize._inject_new_class",
    "torch.nn.utils.parametrize._inject_property",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.autograd._profiler_enabled",
    "torch.cuda.memory._record_memory_history",
    "torch.cuda.memory._snapshot",
    "torch.cuda._get_pynvml_handler",
    "torch.cuda._lazy_call",
    "torch._dynamo.utils.counters",
    "torch._dynamo.utils.get_compilation_metrics",
    "torch._dynamo.utils.dump_compile_times",
    "torch._dynamo.utils.log",
]
_OF_OTHER_BUILDS = {  # with CUDA or NCCL, and torch 2.9
    "_cuda_isHistoryEnabled", "_cuda_isInBadFork", "_dump_nccl_trace_json", "_group_start", "_group_end",
    "_mesh_resources",
}  # fmt: skip
# Those that other modules use: replaced functions, overridden methods, and attributes of objects at hand.
_ELSEWHERE = [
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "torch.UntypedStorage._expired",
    "torch.amp.GradScaler._check_scale_growth_tracker",
    "torch.amp.GradScaler._found_inf_per_device",
    "torch.amp.GradScaler._per_optimizer_states",
    "torch.amp.GradScaler._scale",
    "torch.distributed.elastic.agent.server.api.SimpleElasticAgent._assign_worker_ranks",
    "torch.distributed.elastic.agent.server.api.SimpleElasticAgent._rendezvous",
    "torch.distributed.elastic.agent.server.api._get_fq_hostname",
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state",
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam._unsharded_param",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._is_root",
    "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback",
    "torch.distributed.fsdp.wrap._Policy._run_policy",
    "torch.distributed.rendezvous._create_c10d_store",
    "torch.nn.Module._buffers",
    "torch.nn.Module._call_impl",
    "torch.nn.Module._compiled_call_impl",
    "torch.nn.Module._parameters",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.parallel.DistributedDataParallel._sync_module_buffers",
    "torch._C._distributed_c10d.Reducer._reset_state",
    "torch.optim.lr_scheduler.SequentialLR._schedulers",
    "torch.utils.data.DataLoader._iterator",
    "torch.utils.data.dataloader._BaseDataLoaderIter._dataset_kind",
    "torch.utils.data.dataloader._BaseDataLoaderIter._num_workers",
    "torch.utils.data.dataloader._BaseDataLoaderIter._persistent_workers",
]


def _is_there(name: str) -> bool:
    """Return whether torch has a name: of a module or class, or an attribute that the source of a class mentions."""
    path = name.split(".")
    at = next(at for at in range(len(path), 0, -1) if _module(".".join(path[:at])) is not None)
    obj: Any = _module(".".join(path[:at]))
    for attribute in path[at:]:
        if not hasattr(obj, attribute):
            is_python = inspect.isclass(obj) and not obj.__module__.startswith("torch._C")
            return is_python and bool(re.search(rf"\b{attribute}\b", inspect.getsource(obj)))
        obj = getattr(obj, attribute)
    return True


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


@pytest.mark.parametrize("names", [_OWN, _ELSEWHERE], ids=["in torch_internals", "elsewhere"])
def test_the_installed_torch_has_all_names(names: list[str]) -> None:
    assert [name for name in names if not _is_there(name)] == [], f"torch {torch.__version__} lacks these names"


def test_a_name_that_torch_lacks_is_found() -> None:
    assert not _is_there("torch.distributed.distributed_c10d._universe")
    assert not _is_there("torch.nn.Module._never_there")


def test_the_list_has_every_name_of_the_module() -> None:
    tree = ast.parse(pathlib.Path(torch_internals.__file__).read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_")}
    listed = {part for name in _OWN for part in name.split(".")} | _OF_OTHER_BUILDS
    assert used - {"_C", "_utils"} - listed == set()


def test_no_other_module_reaches_into_torch() -> None:
    """Names of modules that are imported early, or that sources are recognised by, are no calls."""
    reaches = re.compile(r"^[^#\n]*(?:torch\.(?:\w+\.)*_[a-zA-Z]|distributed_c10d\._|torch\._C)", flags=re.MULTILINE)
    found = {
        str(path.relative_to(_ROOT))
        for path in _ROOT.rglob("*.py")
        if reaches.search(re.sub(r'""".*?"""|"[^"\n]*"', "", path.read_text(encoding="utf-8"), flags=re.DOTALL))
    }
    elsewhere = {"training/fsdp.py", "training/gradients.py"}  # ``_BatchNorm``, and ``_expired`` in each forward pass
    assert found == elsewhere


def test_groups_of_this_process(tmp_path: pathlib.Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        other = dist.new_group([0])
        assert torch_internals.process_groups() == [dist.group.WORLD, other]
        assert torch_internals.ranks_of_groups() == [{0}, {0}]
        before = list(torch_internals.call_counts(other))
        dist.all_reduce(torch.ones(1), group=other)
        assert list(torch_internals.call_counts(other)) == [count + 1 for count in before]
        torch_internals.default_store().set("a key", "a value")
        assert torch_internals.default_store().get("a key") == b"a value"
    finally:
        torch_internals.abort_process_groups()
    assert torch_internals.process_groups() == []
