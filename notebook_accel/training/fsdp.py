"""Models whose parameters, gradients and optimizer state are sharded over the ranks, by torch's ``fully_shard``.

Sharding replaces a model's parameters by ``DTensor`` shards. An optimizer that was created before gets the new ones,
whether it is prepared together with the model, before it or after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils.checkpoint import checkpoint

from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.payload.sharded_tensors import is_sharded_module, is_sharded_tensor
from notebook_accel.training import collectives
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.compiling import uncompiled
from notebook_accel.training.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.trees import map_leaves

# Prepared sharded models, each with pairs of an original parameter and its replacement.
_sharded_models: weakref.WeakKeyDictionary[torch.nn.Module, list[tuple[torch.Tensor, torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)

ACCUMULATING: list[weakref.ref[torch.nn.Module]] = []  # to sharded models that were in ``no_sync``


def is_sharded(model: object) -> bool:
    """Return whether a model was prepared and is sharded by ``fully_shard``."""
    return bool(_sharded_models) and isinstance(model, torch.nn.Module) and uncompiled(model) in _sharded_models


def was_fully_sharded(model: torch.nn.Module) -> bool:
    """Return whether ``fully_shard`` was applied to a model or a part of it, here or by the user's code."""
    return any(True for _ in _units(model))


def _units(model: torch.nn.Module) -> Iterator[Any]:
    return filter(is_sharded_module, model.modules())


def _groups(model: torch.nn.Module) -> Iterator[Any]:
    """Yield torch's groups of parameters that are gathered together."""
    for unit in _units(model):
        state = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch 2.13 has several
        yield from (group for group in groups if group is not None)


def data_mesh(model: torch.nn.Module) -> Any:
    """Return the mesh over which ``fully_shard`` shards and replicates a model; ``None`` if it has no parameters."""
    return next((group.mesh_info.mesh for group in _groups(model)), None)


def register(model: torch.nn.Module, before_forward: Callable[[], None]) -> None:
    """Register a sharded model, and call ``before_forward`` before each forward pass, which waits for all ranks."""
    _sharded_models.setdefault(model, [])
    is_left_whole = False

    def before_gathering(*_: object) -> None:
        nonlocal is_left_whole
        if is_left_whole and torch.is_grad_enabled():
            reshard(model)
        before_forward()
        is_left_whole = not torch.is_grad_enabled() or not any(p.requires_grad for p in model.parameters())

    def after_evaluation(*_: object) -> None:
        # Nobody would notice that values written to gathered parameters are lost.
        if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for unit in _units(model):
                unit.reshard()

    model.register_forward_pre_hook(before_gathering, prepend=True)
    model.register_forward_hook(after_evaluation)


def reshard(model: torch.nn.Module) -> dict[int, torch.nn.Parameter]:
    """Reshard parameters that a forward pass without a backward pass, as in evaluation, has left gathered.

    Shards take over ``requires_grad`` of the gathered parameters, since torch doesn't copy it.

    Returns:
        The shard of each gathered parameter, by the gathered parameter's ``id``.
    """
    whole = {name: p for name, p in model.named_parameters(remove_duplicate=False) if not is_sharded_tensor(p)}
    for unit in _units(model):
        unit.reshard()
    shares = dict(model.named_parameters(remove_duplicate=False))
    whole = {name: parameter for name, parameter in whole.items() if shares[name] is not parameter}
    for name, parameter in whole.items():
        shares[name].requires_grad_(parameter.requires_grad)
    return {id(parameter): shares[name] for name, parameter in whole.items()}


def shard(
    model: torch.nn.Module,
    backend: Backend,
    plugin: FullyShardedDataParallelPlugin,
    dtype: torch.dtype | None,
    before_forward: Callable[[], None],
    mesh: Any = None,
) -> list[torch.Tensor]:
    """Shard a model in place, with rank 0's weights, and return the parameters that stay whole.

    The model may be on the meta device on ranks above 0, and tensor-parallel already on another dimension of the mesh.

    Args:
        model: The model.
        backend: The backend of this rank.
        plugin: The settings.
        dtype: The type that the forward pass computes in, ``None`` for that of the parameters.
        before_forward: Called before each forward pass, which waits for the other ranks.
        mesh: The ``DeviceMesh`` of the shards, or of replicas and shards; by default shards on all ranks.

    Raises:
        CollectiveError: The ranks prepare different models.
        ConfigError: A setting doesn't fit this model or this device.
        TrainingError: Some tensor-parallel parameters can't be sharded further.
    """
    collectives.verify_model(backend, model)
    mesh = backend.mesh({"all_ranks": backend.place.world_size}, {}) if mesh is None else mesh
    named = list(model.named_parameters(remove_duplicate=False))
    ignored = _ignored(model, plugin)
    units = chosen_units(model, plugin)
    _refuse_parts(model, ignored)
    full = share_weights(model, backend, mesh, sync=bool(plugin.sync_module_states))
    if plugin.activation_checkpointing:
        _recompute(units, model)
    kept = _named(model, ignored)
    _fully_shard(model, units, kept, mesh=mesh, plugin=plugin, dtype=dtype, device=backend.device)
    if full is not None:
        _scatter(model, full, backend)
        kept = _named(model, ignored)
    for tensor in kept:
        tensor.data = tensor.data.to(backend.device)
    register(model, before_forward)
    new = dict(model.named_parameters(remove_duplicate=False))
    _sharded_models[model] = [(old, new[name]) for name, old in named if new[name] is not old]
    for old, _ in _sharded_models[model]:
        _release(old)
    return kept


def _release(old: Any) -> None:
    """Free the memory of a replaced parameter, which an optimizer may still reference."""
    if not is_sharded_tensor(old):
        old.data = old.new_empty(0)
        return
    storage = old.to_local().untyped_storage()
    if storage.resizable():
        storage.resize_(0)


def _refuse_parts(model: torch.nn.Module, ignored: set[str]) -> None:
    """Raise ``TrainingError`` for parameters of ``parallelize_module`` that can't be sharded further."""
    for name, parameter in model.named_parameters():
        if is_sharded_tensor(parameter) and (name in ignored or parameter.is_meta):
            raise TrainingError(
                f"{name} of {type(model).__name__} is a part that parallelize_module has made, and is "
                f"{'on the meta device' if parameter.is_meta else 'in ignored_modules'}.",
                fix="load the weights before parallelize_module"
                if parameter.is_meta
                else "leave its module out of ignored_modules, or out of parallelize_module",
            )


def _named(model: torch.nn.Module, names: set[str]) -> list[torch.Tensor]:
    return [parameter for name, parameter in model.named_parameters() if name in names]


def _fully_shard(
    model: torch.nn.Module,
    units: Sequence[torch.nn.Module],
    ignored: Sequence[torch.Tensor],
    *,
    mesh: Any,
    plugin: FullyShardedDataParallelPlugin,
    dtype: torch.dtype | None,
    device: torch.device,
) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    offload = plugin.cpu_offload if isinstance(plugin.cpu_offload, OffloadPolicy) else None
    if plugin.cpu_offload and device.type == "cpu":
        raise ConfigError("cpu_offload needs a GPU, and this rank computes on CPU.", fix="leave cpu_offload out")
    options: dict[str, Any] = {
        "mesh": mesh,
        "ignored_params": set(ignored),
        "offload_policy": offload or (CPUOffloadPolicy() if plugin.cpu_offload else OffloadPolicy()),
    }
    policy = plugin.precision_policy(dtype)
    inner = dataclasses.replace(policy, output_dtype=None)  # blocks return activations uncast
    norms: list[torch.nn.Module] = []
    if policy.param_dtype is not None:
        # Batch norms keep statistics in float32, and accept inputs of another type only with weights in float32.
        batch_norms = (part for part in model.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm))
        norms = [norm for norm in batch_norms if norm.affine]
    for norm in norms:
        fully_shard(
            norm, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), reshard_after_forward=False, **options
        )
    for unit in units:
        if unit not in norms:  # torch shards a module once
            fully_shard(unit, mp_policy=inner, reshard_after_forward=bool(plugin.reshard_after_forward), **options)
    if model not in norms:
        whole = dataclasses.replace(policy, output_dtype=policy.output_dtype or (dtype and torch.float32))
        fully_shard(
            model, mp_policy=whole, reshard_after_forward=None if plugin.reshard_after_forward else False, **options
        )


def _ignored(model: torch.nn.Module, plugin: FullyShardedDataParallelPlugin) -> set[str]:
    """Return the names of the parameters that stay whole on every rank."""
    asked: Any = plugin.ignored_modules
    if isinstance(asked, str):
        pattern = re.compile(asked)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
        if not modules:
            raise ConfigError(
                f"ignored_modules is {asked!r}, and no module of {type(model).__name__} has such a name.",
                fix="a regular expression that matches whole names, such as those of model.named_modules()",
            )
    else:
        own = set(model.modules())
        modules = [module for module in asked or () if module in own]  # the plugin may be for other models too
    inside = {parameter for module in modules for parameter in module.parameters()}
    # torch shards no parameter without dimensions, such as a learned temperature.
    return {name for name, parameter in model.named_parameters() if parameter in inside or not parameter.ndim}


# The units that are gathered one at a time


def chosen_units(model: torch.nn.Module, plugin: FullyShardedDataParallelPlugin) -> list[torch.nn.Module]:
    """Return the modules of a model that are gathered one at a time, inner modules first.

    A module that shares a parameter with an outside module is left to the root unit, to gather that parameter once.
    """
    policy = plugin.auto_wrap_policy
    if policy == "TRANSFORMER_BASED_WRAP":
        chosen = _blocks(model, list(plugin.transformer_cls_names_to_wrap or ()))
    elif policy == "SIZE_BASED_WRAP":
        chosen = _large_parts(model, plugin.min_num_params or 0)
    elif policy == "NO_WRAP":
        chosen = set()
    elif hasattr(policy, "_run_policy"):
        chosen = set(cast(Any, policy)._run_policy(model, set(), {}))
    else:
        assert callable(policy)
        sized = ((module, sum(p.numel() for p in module.parameters())) for module in model.modules())
        chosen = {part for part, size in sized if policy(module=part, recurse=False, nonwrapped_numel=size)}
    owners: dict[torch.Tensor, set[torch.nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, set()).add(module)
    shared = {parameter: of_one for parameter, of_one in owners.items() if len(of_one) > 1}

    def is_apart(unit: torch.nn.Module) -> bool:
        inside = set(unit.modules())
        return all(of_one <= inside for of_one in shared.values() if of_one & inside)

    ordered = [module for module in reversed(list(model.modules())) if module in chosen and module is not model]
    return [unit for unit in ordered if next(unit.parameters(), None) is not None and is_apart(unit)]


def _blocks(model: torch.nn.Module, names: list[str]) -> set[torch.nn.Module]:
    """Return the modules whose class has one of the names; without names, the model's repeated blocks."""
    names = names or [*(getattr(model, "_no_split_modules", None) or ())]
    if not names:
        return _repeated_blocks(model)
    found = {module for module in model.modules() if type(module).__name__ in names}
    missing = set(names) - {type(module).__name__ for module in found}
    if missing:
        known = sorted({type(module).__name__ for module in model.modules()})
        raise ConfigError(
            f"{type(model).__name__} has no module of the class {', '.join(sorted(missing))}, which "
            "transformer_cls_names_to_wrap names.",
            fix=f"some of {', '.join(known)}; or leave it out for the model's repeated blocks",
        )
    return found


def _repeated_blocks(module: torch.nn.Module) -> set[torch.nn.Module]:
    """Return the members of each ``ModuleList``, and the repeated ones of each ``Sequential``."""
    if isinstance(module, torch.nn.ModuleList):
        return {part for part in module if not isinstance(part, (torch.nn.ModuleList, torch.nn.ModuleDict))}
    blocks = _repeated_parts(module) if isinstance(module, torch.nn.Sequential) else set()
    return blocks.union(*(_repeated_blocks(child) for child in module.children() if child not in blocks))


def _repeated_parts(sequence: torch.nn.Sequential) -> set[torch.nn.Module]:
    """Return the parts of one class, that with the most parameters of those with several parts."""
    by_class: dict[type, set[torch.nn.Module]] = {}
    for part in sequence:
        by_class.setdefault(type(part), set()).add(part)
    sizes = {kind: sum(p.numel() for part in parts for p in part.parameters()) for kind, parts in by_class.items()}
    repeated = [kind for kind, parts in by_class.items() if len(parts) > 1 and sizes[kind]]
    return by_class[max(repeated, key=sizes.__getitem__)] if repeated else set()


def _large_parts(model: torch.nn.Module, smallest: int) -> set[torch.nn.Module]:
    """Return the innermost modules with at least ``smallest`` parameters, besides those of chosen submodules."""
    chosen: set[torch.nn.Module] = set()
    taken: set[torch.Tensor] = set()
    for module in reversed(list(model.modules())):  # inner modules first
        own = [parameter for parameter in module.parameters() if parameter not in taken]
        is_container = type(module).forward is torch.nn.Module.forward
        if own and not is_container and sum(parameter.numel() for parameter in own) >= smallest:
            chosen.add(module)
            taken.update(own)
    return chosen


def _recompute(units: Sequence[torch.nn.Module], model: torch.nn.Module) -> None:
    """Make blocks recompute their activations in the backward pass instead of keeping them."""
    if not units:
        raise ConfigError(
            f"activation_checkpointing finds no blocks in {type(model).__name__}.",
            fix='auto_wrap_policy="transformer_based_wrap" with transformer_cls_names_to_wrap=[...], or without it',
        )
    for unit in units:
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)


# Initial weights


def share_weights(
    model: torch.nn.Module, backend: Backend, mesh: Any = None, *, sync: bool = True
) -> dict[str, torch.Tensor] | None:
    """Broadcast rank 0's weights, and tensor-parallel shards from the first replica.

    ``mesh`` has the ranks with equal tensor-parallel shards. ``sync=False`` only handles models without weights.

    Returns:
        ``None``, or if some rank's model has no weights (is on the meta device): the model's state on rank 0, ``{}`` on
        the others. All ranks' models are then on the meta device, to be filled from that state.
    """
    tensors = [*model.parameters(), *model.buffers()]
    is_empty = any(tensor.is_meta for tensor in tensors)
    if any(collectives.gather_object(backend, [is_empty])):
        return _emptied(model, backend)
    for tensor in tensors if sync else ():
        if is_sharded_tensor(tensor):
            _broadcast_part(tensor, mesh)
            continue
        on_device = tensor.data.to(backend.device).contiguous()
        backend.broadcast(on_device, 0)
        tensor.data.copy_(on_device)
    return None


def _broadcast_part(tensor: Any, mesh: Any) -> None:
    """Replace a tensor-parallel shard by that of the first rank of ``mesh``, which has it in another replica."""
    local = tensor.detach().to_local().contiguous()
    for dim in reversed(range(0 if mesh is None else mesh.ndim)):
        torch.distributed.broadcast(local, group=mesh.get_group(dim), group_src=0)
    tensor.detach().to_local().copy_(local)


def _emptied(model: torch.nn.Module, backend: Backend) -> dict[str, torch.Tensor]:
    is_main = backend.place.rank == 0
    empty = [name for name, tensor in _named_tensors(model) if tensor.is_meta] if is_main else []
    if collectives.gather_object(backend, empty):
        raise TrainingError(
            f"{type(model).__name__} has no weights on rank 0: it is on the meta device.",
            fix="load the weights on rank 0, and with cpu_ram_efficient_loading=True on no other rank",
        )
    state = dict(_named_tensors(model)) if is_main else {}
    emptied: dict[torch.Tensor, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                module._parameters[name] = emptied.setdefault(parameter, new)
    return state


def _named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _scatter(model: torch.nn.Module, full: dict[str, torch.Tensor], backend: Backend) -> None:
    """Fill a sharded model on the meta device with rank 0's ``full`` state."""
    made: dict[torch.Tensor, Any] = {}
    parameters = dict(model.named_parameters())
    for name, tensor in _named_tensors(model):
        whole = full[name].data if backend.place.rank == 0 else torch.empty(tensor.shape, dtype=tensor.dtype)
        on_device = whole.to(backend.device).contiguous()
        if is_sharded_tensor(tensor):
            made[tensor] = torch.nn.Parameter(_distributed(on_device, tensor, source=0), tensor.requires_grad)
            continue
        backend.broadcast(on_device, 0)
        made[tensor] = torch.nn.Parameter(on_device, tensor.requires_grad) if name in parameters else on_device
    for module in model.modules():
        slots: dict[str, Any]
        for slots in (module._parameters, module._buffers):
            slots.update({name: made[tensor] for name, tensor in slots.items() if tensor is not None})


def _distributed(whole: torch.Tensor, like: Any, *, source: int | None = None) -> Any:
    """Return a whole tensor sharded like another; ``source`` is the rank that has it, ``None`` if every rank does."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=source)


def sharded_like(value: torch.Tensor, parameter: Any) -> torch.Tensor:
    """Return a tensor, whole on every rank, sharded like a parameter if that is sharded and has its shape."""
    if not is_sharded_tensor(parameter) or is_sharded_tensor(value) or value.shape != parameter.shape:
        return value
    sharded: torch.Tensor = _distributed(value.to(parameter.device), parameter)
    return sharded


def empty_like(own: Any, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor on the mesh of ``own``, sharded if sizes agree; on the CPU if ``own`` isn't sharded."""
    if not is_sharded_tensor(own):
        return torch.empty(size, dtype=dtype)
    from torch.distributed.tensor import Replicate, empty

    placements = own.placements if own.shape == size else [Replicate()] * own.device_mesh.ndim
    made: torch.Tensor = empty(size, dtype=dtype, device_mesh=own.device_mesh, placements=placements)
    return made


# Training of a sharded model


def remap(optimizer: torch.optim.Optimizer) -> None:
    """Replace an optimizer's original parameters by those of the sharded models, and shard its state."""
    new = {id(old): parameter for pairs in _sharded_models.values() for old, parameter in pairs} | _shards()
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]
    for old in [parameter for parameter in optimizer.state if id(parameter) in new]:
        parameter = new[id(old)]
        optimizer.state[parameter] = {
            name: sharded_like(value, parameter) if isinstance(value, torch.Tensor) else value
            for name, value in optimizer.state.pop(old).items()
        }


def _shards() -> dict[int, torch.nn.Parameter]:
    """Reshard all models. Return the shard of each parameter that was gathered, by that parameter's ``id``."""
    return {number: shard for model in _sharded_models for number, shard in reshard(model).items()}


def shards_of(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return parameters, with its shard for each one that a forward pass without a backward pass has left gathered."""
    if not _sharded_models or all(map(is_sharded_tensor, parameters)):
        return parameters
    shards = _shards()
    return [shards.get(id(parameter), parameter) for parameter in parameters]


@contextlib.contextmanager
def no_sync(model: torch.nn.Module) -> Iterator[None]:
    """Keep a sharded model's gradients local and unsharded in the body's backward passes."""
    for each in (uncompiled(model), model):  # a compiled model has its own zero_grad
        if each not in _accumulating():
            ACCUMULATING.append(weakref.ref(each, ACCUMULATING.remove))
            _extend_zero_grad(each)
    for unit in _units(model):
        unit.set_requires_gradient_sync(False, recurse=False)
    try:
        yield
    finally:
        for unit in _units(model):
            unit.set_requires_gradient_sync(True, recurse=False)


def _extend_zero_grad(model: torch.nn.Module) -> None:
    """Make a sharded model's ``zero_grad`` drop what ``no_sync`` has left, too."""
    usual = model.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        _drop(_local_parts(model))
        usual(set_to_none)

    object.__setattr__(model, "zero_grad", zero_grad)  # a compiled model would set it on the one inside


def has_local_gradients(model: torch.nn.Module) -> bool:
    """Return whether ``no_sync`` has left gradients of a sharded model in torch's own buffers."""
    return uncompiled(model) in _accumulating() and any(True for _ in _local_parts(model))


def _accumulating() -> list[torch.nn.Module]:
    return [model for reference in ACCUMULATING if (model := reference()) is not None]


def drop_local_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Drop the gradients that ``no_sync`` has left of sharded parameters, which torch's ``zero_grad`` doesn't reach."""
    _drop(_local_parts_of(parameters))


def _drop(parts: Iterable[Any]) -> None:
    for part in parts:
        part.unsharded_accumulated_grad = part._unsharded_param.grad = None


def average_local_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Average and shard the gradients that ``no_sync`` has left of sharded parameters, as a backward pass does."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model in list(_sharded_models):  # in an order that all ranks have in common
        if any(id(part.sharded_param) in wanted for part in _local_parts(model)):
            groups = list(_groups(model))
            before = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
            for group in groups:  # an optimizer may step in ``no_sync``
                group.reduce_grads = group.all_reduce_grads = True
            for state in (unit._get_fsdp_state() for unit in _units(model)):
                if state._is_root:
                    state._root_post_backward_final_callback()
            for group, (reduces, all_reduces) in zip(groups, before, strict=True):
                group.reduce_grads, group.all_reduce_grads = reduces, all_reduces


def gradients_of(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of parameters, also those that ``no_sync`` has left of sharded ones."""
    parts = [(part.unsharded_accumulated_grad, part._unsharded_param.grad) for part in _local_parts_of(parameters)]
    found = itertools.chain((parameter.grad for parameter in parameters), *parts)
    return [gradient for gradient in found if gradient is not None]


def _local_parts_of(parameters: Iterable[torch.Tensor]) -> Iterator[Any]:
    if ACCUMULATING:
        wanted = set(map(id, parameters))
        parts = itertools.chain.from_iterable(map(_local_parts, _accumulating()))
        yield from (part for part in parts if id(part.sharded_param) in wanted)


def _local_parts(model: torch.nn.Module) -> Iterator[Any]:
    """Yield torch's records of those parameters that have a gradient of this rank alone."""
    for group in _groups(model):
        for part in group.fsdp_params:
            gathered = getattr(part, "_unsharded_param", None)  # torch makes it when it first gathers the parameter
            if part.unsharded_accumulated_grad is not None or getattr(gathered, "grad", None) is not None:
                yield part


def refuse_sharded(models: Iterable[Any], what: str, fix: str) -> None:
    """Raise ``TrainingError`` if one of the models is sharded."""
    for model in models:
        if is_sharded(model):
            raise TrainingError(
                f"{what} can't be used with {type(model).__name__}, which is sharded.",
                why="Each rank has a share of every parameter, so all ranks compute together.",
                fix=fix,
            )


def separate_meshes(optimizer: torch.optim.Optimizer) -> None:
    """Disable ``foreach`` in parameter groups that span several meshes, which torch can't update together."""
    for group in optimizer.param_groups:
        if len(by_mesh(group["params"])) > 1 and group.get("foreach", False) is None:
            group["foreach"] = False


def clip_grad_norm(parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip gradients, some of which may be sharded, to a total norm, and return the norm before clipping."""
    norm = total_norm([parameter.grad for parameter in parameters if parameter.grad is not None], norm_type)
    for group in by_mesh(parameters):
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


def total_norm(gradients: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of all gradients together, whole and sharded ones."""
    norm = _greatest if norm_type == float("inf") else torch.nn.utils.get_total_norm
    norms = [_whole(norm(group, norm_type)) for group in by_mesh(gradients)]
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms, norm_type)


def _greatest(gradients: Sequence[Any], _: float) -> torch.Tensor:
    """Return the greatest absolute value. torch's norm raises on a rank whose share of a small gradient is empty."""
    from torch.distributed.tensor import DTensor, Partial

    shares = [gradient.to_local() if is_sharded_tensor(gradient) else gradient for gradient in gradients]
    own = torch.stack([share.abs().max() if share.numel() else share.new_zeros(()) for share in shares]).max()
    mesh = getattr(gradients[0], "device_mesh", None)
    return own if mesh is None else DTensor.from_local(own, mesh, [Partial("max")] * mesh.ndim)


def by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors that torch can process together: whole ones, and those of each mesh."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())


def _whole(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.full_tensor() if is_sharded_tensor(value) else value
    return whole


def whole_state(state: dict[str, Any], backend: Backend) -> dict[str, Any]:
    """Gather a state's tensors on rank 0's CPU, and return ``{}`` on other ranks. All ranks call this."""
    gathered: dict[str, Any] = whole_tree(state, backend)
    return gathered if backend.place.rank == 0 else {}


def whole_tree(tree: Any, backend: Backend) -> Any:
    """Gather nested tensors on rank 0's CPU, and return ``None`` leaves on other ranks. All ranks call this.

    Tensors are gathered one by one. An object that is there several times stays one object.
    """
    made: dict[int, Any] = {}

    def gathered(leaf: Any) -> Any:
        if id(leaf) not in made:
            # A shard that is offloaded to the host is gathered through the device.
            whole = _whole(leaf.detach().to(backend.device)) if is_sharded_tensor(leaf) else leaf
            made[id(leaf)] = on_host(whole) if backend.place.rank == 0 else None
        return made[id(leaf)]

    return map_leaves(gathered, tree)


def on_host(value: Any) -> Any:
    """Return a copy of a tensor on the CPU, of a sharded one a copy of its shard, and any other value as it is."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """Return a model's state dict, in which a tensor with several names is one object."""
    once: dict[int, Any] = {}
    state: dict[str, Any] = uncompiled(model).state_dict(keep_vars=True)
    return {
        name: once.setdefault(id(value), value.detach()) if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }
