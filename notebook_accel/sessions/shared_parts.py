"""The parts that variables share: models, optimizers and their tensors. The kernel and the ranks list them alike.

An optimizer trains a model only as long as both hold the same tensors. So the ranks keep their tensors, and new values
are written into them. The ranks keep their optimizers too, since prepared ones and schedules refer to them.
"""

from __future__ import annotations

import copy
import sys
import types
import weakref
from typing import Any

from notebook_accel.payload import sharded_tensors

BY_NAME = (type, types.FunctionType, types.ModuleType, types.BuiltinFunctionType)
"""The kinds of objects that aren't shared parts."""


def parts(value: Any) -> list[Any]:
    """Return the parts of a value that other values often refer to: the value itself and its tensors."""
    if isinstance(value, BY_NAME):
        return []
    found = [part for part in tensors(value).values() if part is not value]
    try:
        weakref.ref(value)
    except TypeError:
        return found
    return [value, *found]


def tensors(value: Any) -> dict[str, Any]:
    """Return the tensors that a value trains or is trained by, by their names in it.

    These are a model's parameters and buffers, an optimizer's parameters, and a tensor that needs a gradient itself.
    """
    torch = _torch()
    if torch is None:
        return {}
    if isinstance(value, torch.nn.Module):
        return dict([*value.named_parameters(), *value.named_buffers()])
    if isinstance(value, torch.optim.Optimizer):
        return {str(number): part for number, part in enumerate(p for g in value.param_groups for p in g["params"])}
    is_trained = isinstance(value, torch.nn.Parameter) or (is_tensor(value) and value.is_leaf and value.requires_grad)
    return {"": value} if is_trained else {}


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor of torch."""
    torch = _torch()
    return torch is not None and isinstance(value, torch.Tensor)


def is_model(value: Any) -> bool:
    """Return whether a value is a model."""
    torch = _torch()
    return torch is not None and isinstance(value, torch.nn.Module)


def is_optimizer(value: Any) -> bool:
    """Return whether a value is an optimizer."""
    torch = _torch()
    return torch is not None and isinstance(value, torch.optim.Optimizer)


def write(tensor: Any, values: Any, *, requires_grad: bool) -> None:
    """Give a tensor these values, whole even for a sharded tensor; ``None`` keeps its own. The tensor stays the same.

    Every rank that has a share writes it from its own copy of the values, without a collective.
    """
    torch: Any = _torch()
    with torch.no_grad():
        if values is not None and sharded_tensors.is_sharded_tensor(tensor):
            mesh = tensor.device_mesh
            distribute = sys.modules["torch.distributed.tensor"].distribute_tensor
            values = distribute(values.to(mesh.device_type), mesh, tensor.placements, src_data_rank=None)
        if values is not None and (tensor.shape, tensor.dtype) == (values.shape, values.dtype):
            tensor.copy_(values)
        elif values is not None:
            tensor.data = values.to(tensor.device)
    if tensor.requires_grad != requires_grad and tensor.is_leaf:
        tensor.requires_grad_(requires_grad)


def settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a copy of the settings of parameter groups, without the parameters."""
    return [copy.deepcopy({name: value for name, value in group.items() if name != "params"}) for group in groups]


def set_up(
    optimizer: Any,
    defaults: dict[str, Any],
    groups: list[dict[str, Any]],
    state: Any,
    before: list[dict[str, Any]],
) -> None:
    """Give an optimizer these settings and this state; ``None`` keeps its own. The optimizer stays the same.

    Only settings of the groups that differ from those ``before`` are written: a schedule may have changed the others.
    """
    optimizer.defaults.update(defaults)
    for own, group, old in zip(optimizer.param_groups, groups, [*before, *({} for _ in groups)], strict=False):
        changed = {name: value for name, value in group.items() if name not in old or old[name] != value}
        # ``prepare`` may have disabled ``foreach``, and ``None``, the default, doesn't ask for it.
        own.update({name: value for name, value in changed.items() if name != "foreach" or value is not None})
    optimizer.param_groups[len(groups) :] = groups[len(optimizer.param_groups) :]
    if state is not None:
        optimizer.state = state
        optimizer.load_state_dict(optimizer.state_dict())  # moves it to where the rank has the parameters


def _torch() -> Any:
    """Return torch if this process has imported it. Otherwise the process has no tensors and models."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "optim") else None  # without ``optim``, another thread is still importing torch
