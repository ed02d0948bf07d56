"""Pickling of tensors that are sharded over the ranks, and of torch's modules and loaders that torch doesn't pickle.

A shard is useless outside its process group. So a whole copy, which the ranks have gathered before, travels in its
place. A module travels as it was before ``fully_shard``: an object of its own class, without torch's hooks. A module
with parametrizations, such as ``weight_norm``, travels as an object of its own class too, and gets torch's dynamic
class again. A loader leaves the iterator and the processes behind that ``persistent_workers`` keeps.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

from notebook_accel import torch_internals
from notebook_accel.payload.unpicklable import StaysError

_HOOKS_OF = ("torch.distributed.", "notebook_accel.training.")  # modules whose hooks work in the ranks only
_HOOK_DICTS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
_PARAMETRIZE = "torch.nn.utils.parametrize"


def is_sharded_tensor(value: object) -> bool:
    """Return whether a value is a ``DTensor``. False until that class is imported."""
    tensors: Any = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, getattr(tensors, "DTensor", ()))


def is_sharded_module(value: object) -> bool:
    """Return whether ``fully_shard`` was applied to this module itself, not only to a submodule."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(value, getattr(fsdp, "FSDPModule", ()))


def note_on(value: Any) -> str:
    """Return a line that tells how to gather a sharded value; empty for any other value."""
    if "torch.distributed.tensor" not in sys.modules:
        return ""
    torch: Any = sys.modules["torch"]
    if isinstance(value, torch.nn.Module):
        is_sharded = any(map(is_sharded_tensor, value.parameters()))
        fix = "%pull its name, or accelerator.get_state_dict(...) on all ranks, brings them whole"
        return f"\n[its parameters are sharded over the ranks: {fix}]" if is_sharded else ""
    items = value.values() if isinstance(value, Mapping) else value if type(value) in (list, tuple) else [value]
    shapes = [tuple(item.shape) for item in items if is_sharded_tensor(item)]
    if not shapes:
        return ""
    of = f"a tensor of shape {shapes[0]}" if len(shapes) == 1 else f"{len(shapes)} tensors"
    return f"\n[each rank shows its share of {of}: .full_tensor() on all ranks, or %pull its name, brings it whole]"


def types() -> tuple[type, ...]:
    """Return the classes whose objects ``reduce`` handles, as far as they are imported."""
    names = {"torch.nn": "Module", "torch.utils.data.dataloader": "DataLoader", "torch.distributed.tensor": "DTensor"}
    found = [getattr(sys.modules.get(module), name, None) for module, name in names.items()]
    return tuple(kind for kind in found if kind is not None)


def reduce(obj: Any, wholes: Mapping[int, Any]) -> Any:
    """Reduce an object, for ``reducer_override``. ``wholes``: see ``pickle_by_value``."""
    if is_sharded_tensor(obj):
        return _reduce_tensor(obj, wholes)
    torch: Any = sys.modules["torch"]
    return _reduce_module(obj) if isinstance(obj, torch.nn.Module) else _reduce_loader(obj)


def _reduce_loader(loader: Any) -> Any:
    reduced = loader.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if vars(loader).get("_iterator") else NotImplemented
    if isinstance(reduced, tuple) and isinstance(reduced[2], dict):
        return *reduced[:2], {**reduced[2], "_iterator": None}, *reduced[3:]
    return reduced


def _reduce_tensor(tensor: Any, wholes: Mapping[int, Any]) -> Any:
    whole = wholes.get(id(tensor))
    if whole is None:
        raise StaysError(tensor, "this tensor is one rank's share, and can be gathered only where all ranks take part")
    torch: Any = sys.modules["torch"]
    if isinstance(tensor, torch.nn.Parameter):
        return torch_internals.parameter_parts(whole, tensor.requires_grad)
    return _whole, (whole, tensor.requires_grad)


def _whole(tensor: Any, requires_grad: bool) -> Any:
    return tensor.requires_grad_(requires_grad)


def _reduce_module(module: Any) -> Any:
    theirs = _hooks_of_ranks(vars(module))
    own = kind = type(module)
    if is_sharded_module(module):
        own = kind.__mro__[getattr(kind, "_orig_cls_mro_index", 2)]  # as in FSDPModule.__new__
    parametrized: tuple[str, ...] = ()
    is_on_a_rank = own is not kind or bool(theirs)
    if own.__module__ == _PARAMETRIZE and "__getstate__" in vars(own):  # which refuses
        own, parametrized = own.__bases__[0], tuple(module.parametrizations)
    elif not is_on_a_rank:
        return NotImplemented
    object.__setattr__(module, "__class__", own)  # bypasses the module's own __setattr__
    try:
        reduced = module.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    finally:
        object.__setattr__(module, "__class__", kind)
    if not isinstance(reduced, tuple):
        return reduced
    make, args, *rest = reduced
    if getattr(make, "__name__", "") == "__newobj__":  # pickle requires an object of exactly this class for __newobj__
        make = args[0].__new__
    if is_on_a_rank and rest and isinstance(rest[0], dict):
        rest[0] = _without(rest[0], theirs)
    return (_parametrized, (parametrized, make, args), *rest) if parametrized else (make, args, *rest)


def _parametrized(names: tuple[str, ...], make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    module = make(*args)
    torch_internals.parametrize(module, names)
    return module


def _hook_dicts(attributes: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
    """Return the dictionaries of a module's hooks and of their flags, each keyed by the hooks' numbers."""
    named = ((name, value) for name, value in attributes.items() if name.endswith(_HOOK_DICTS))
    return {name: value for name, value in named if isinstance(value, dict)}


def _hooks_of_ranks(attributes: Mapping[str, Any]) -> set[int]:
    """Return the numbers of a module's hooks that work in the ranks only: torch's and this package's."""
    found = (entry for hooks in _hook_dicts(attributes).values() for entry in hooks.items())
    return {number for number, hook in found if str(getattr(hook, "__module__", "")).startswith(_HOOKS_OF)}


def _without(attributes: Mapping[str, Any], hooks: set[int]) -> dict[str, Any]:
    """Return a module's attributes without these hooks and without the state of ``fully_shard``."""
    dropped = torch_internals.fully_shard_attributes()
    kept = {name: value for name, value in attributes.items() if name not in dropped}
    for name, found in _hook_dicts(kept).items():
        kept[name] = type(found)((number, hook) for number, hook in found.items() if number not in hooks)
    return kept
