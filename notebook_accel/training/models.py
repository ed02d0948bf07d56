"""Prepares models: device placement, mixed precision and gradient averaging."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import dataclasses
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from notebook_accel import torch_internals
from notebook_accel.errors import TrainingError
from notebook_accel.payload.sharded_tensors import is_sharded_tensor
from notebook_accel.training import collectives, fsdp, gradients
from notebook_accel.training.backends.backend import Backend, all_ranks
from notebook_accel.training.collectives import verify_model
from notebook_accel.training.compiling import compiled_from, uncompiled, without_own_wrapper
from notebook_accel.training.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.gradients import AveragingWrapper, HookedTensors, TrainableParameters
from notebook_accel.training.handlers import DistributedDataParallelKwargs
from notebook_accel.training.precision import Precision
from notebook_accel.training.trees import to_float32


def is_leaf(item: object) -> bool:
    """Return whether an item is a bare trainable tensor, which can take the place of a model."""
    return isinstance(item, torch.Tensor) and item.is_leaf and item.requires_grad


def prepare_leaf(leaf: torch.Tensor, backend: Backend, *, device_placement: bool = True) -> torch.Tensor:
    """Return the same tensor on the device, with rank 0's values and a gradient that is averaged over the ranks."""
    if device_placement:
        backend.place_leaf(leaf)  # in place, so that existing optimizers still work
    if backend.place.world_size > 1:
        collectives.broadcast(backend, leaf.data)
        HookedTensors([leaf], backend)
    return leaf


@dataclasses.dataclass(frozen=True)
class DataParallelism:
    """How ranks train a model together.

    Attributes:
        ddp: The options with which gradients are averaged.
        averages: False if gradients aren't averaged, unless the model is sharded.
        sharding: The settings with which the model is sharded over the ranks instead, ``None`` if it isn't.
        mesh: The ``DeviceMesh`` of the ranks over which ``sharding`` shards and replicates; ``None`` for all ranks.
        before_training_pass: Called before each forward pass that trains together with other ranks.
        before_sharded_pass: Called before each forward pass of a sharded model.
    """

    ddp: DistributedDataParallelKwargs = dataclasses.field(default_factory=DistributedDataParallelKwargs)
    averages: bool = True
    sharding: FullyShardedDataParallelPlugin | None = None
    mesh: Any = None
    before_training_pass: Callable[[], None] = lambda: None
    before_sharded_pass: Callable[[], None] = lambda: None


def prepare_model(
    model: torch.nn.Module,
    backend: Backend,
    precision: Precision,
    parallelism: DataParallelism,
    *,
    device_placement: bool = True,
) -> torch.nn.Module:
    """Return the model that training calls: on the device, under autocast, gradients averaged over the ranks.

    With one rank this is ``model`` itself. The model keeps its parameters, so existing optimizers still work. Only
    sharding replaces them. A model that is sharded already stays as it is. In ``backend``, ranks that work on the same
    samples count as one.

    Raises:
        CollectiveError: The ranks prepare different models, or one of them makes another call.
        TrainingError: The model is tensor-parallel in several replicas, and nothing would average their gradients.
    """
    data_backend, backend = backend, all_ranks(backend)
    is_alone = backend.place.world_size == 1
    model = _without_wrappers(model, backend)
    has_own_ddp = isinstance(model, DistributedDataParallel)
    if fsdp.was_fully_sharded(model):
        return _sharded_before(model, backend, precision, parallelism.before_sharded_pass)
    if "_own" in vars(type(model)):  # it autocasts in the precision of that Accelerator
        _set_class(model, cast(_Autocasting, model)._own)
    if parallelism.sharding is not None and not is_alone and not has_own_ddp:
        return _sharded(model, backend, precision, parallelism)
    if device_placement and not _has_its_place(model):
        backend.place_model(model)
    if precision.dtype is not None:
        _begin_autocasting(model, precision.autocast)
    if any(map(is_sharded_tensor, model.parameters())):
        return _tensor_parallel(model, data_backend, parallelism.before_sharded_pass)
    if is_alone or has_own_ddp or not parallelism.averages:
        return model
    return _data_parallel(model, backend, parallelism)


def _without_wrappers(model: torch.nn.Module, backend: Backend) -> torch.nn.Module:
    """Return the model in the wrappers of an earlier ``prepare`` and in ``DataParallel``.

    Another Accelerator may have prepared it, with another precision, or in a group that has ended since.
    """
    model = without_own_wrapper(model)
    while isinstance(model, AveragingWrapper):
        model = cast(torch.nn.Module, model.module)
    if isinstance(model, torch.nn.DataParallel) and backend.place.world_size > 1:
        warnings.warn(
            "The model was wrapped in DataParallel, which would use every GPU in each of the "
            f"{backend.place.world_size} ranks: prepare takes the model in it. Fix: leave DataParallel out",
            stacklevel=3,
        )
        model = model.module
    return model


def _sharded(
    model: torch.nn.Module, backend: Backend, precision: Precision, parallelism: DataParallelism
) -> torch.nn.Module:
    """Shard a model in place and return it. Gradients of parameters that stay whole are averaged."""
    plugin = parallelism.sharding
    assert plugin is not None
    _refuse_other_mesh(model, parallelism.mesh)
    later = _LateAveraging(model, backend, parallelism.before_sharded_pass)
    whole = fsdp.shard(uncompiled(model), backend, plugin, precision.dtype, later, parallelism.mesh)
    HookedTensors([parameter for parameter in whole if parameter.requires_grad], backend)
    later.begin()
    return model


def _data_parallel(model: torch.nn.Module, backend: Backend, parallelism: DataParallelism) -> torch.nn.Module:
    """Return a model whose gradients are averaged over the ranks; a frozen one as it is."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        gradients.register_frozen(model, backend)
        return model
    verify_model(backend, model)
    distributed: Any = backend.data_parallel(model, parallelism.ddp)
    # The backward pass checks too, but a forward pass can also wait for the other ranks.
    distributed.before_training_pass = parallelism.before_training_pass
    return cast(torch.nn.Module, distributed)


def _has_its_place(model: torch.nn.Module) -> bool:
    """Return whether Transformers, which sets these attributes, forbids moving a model to another device."""
    for module in model.modules():
        own = vars(module)
        places = own.get("hf_device_map") or {}
        is_quantised = own.get("is_loaded_in_8bit") or own.get("is_loaded_in_4bit")
        if is_quantised or len(set(map(str, places.values()))) > 1 or (places and own.get("is_quantized")):
            return True
    return False


def _sharded_before(
    model: torch.nn.Module, backend: Backend, precision: Precision, before_sharded_pass: Callable[[], None]
) -> torch.nn.Module:
    """Register and return a model that an earlier ``prepare`` or the user's code has sharded by ``fully_shard``.

    If only some modules are sharded, the gradients of the rest are averaged.
    """
    if not fsdp.is_sharded(model):
        if precision.dtype is not None:
            warnings.warn(
                f"{type(model).__name__} was sharded before prepare: it computes in the precision of its own policy, "
                f"not in {precision.name}. Fix: fully_shard(..., mp_policy=MixedPrecisionPolicy(...))",
                stacklevel=2,
            )
        later = _LateAveraging(model, backend, before_sharded_pass)
        fsdp.register(uncompiled(model), later)
        for parameter in model.parameters():
            if parameter.requires_grad and not is_sharded_tensor(parameter):
                prepare_leaf(parameter, backend)
        later.begin()
    return model


def _tensor_parallel(model: torch.nn.Module, backend: Backend, before_pass: Callable[[], None]) -> torch.nn.Module:
    """Register and return a tensor-parallel model, after broadcasting the weights that ranks have in common."""
    if backend.place.world_size > 1:
        raise TrainingError(
            f"prepare can't take {type(model).__name__}: parallelize_module has made {backend.place.world_size} "
            "copies of it, and nobody averages their gradients.",
            fix="fsdp_plugin=FullyShardedDataParallelPlugin() with parallelism_config=ParallelismConfig("
            f"dp_shard_size={backend.place.world_size}, tp_size=...), or fully_shard before prepare",
        )
    verify_model(all_ranks(backend), model)
    fsdp.share_weights(model, all_ranks(backend))
    fsdp.register(uncompiled(model), before_pass)
    return model


class _LateAveraging:
    """Averages gradients of parameters that become trainable later in a sharded model: unfrozen and added ones.

    They are whole on each rank. The object is called before each forward pass, while other parameters are sharded.
    """

    def __init__(self, model: torch.nn.Module, backend: Backend, before_pass: Callable[[], None]) -> None:
        self._model = model
        self._backend = backend
        self._before_pass = before_pass

    def begin(self) -> None:
        """Record which parameters are trainable now."""
        self._parameters = TrainableParameters(self._model)
        self._averaged = {id(parameter): parameter for parameter in self._parameters.trainable}

    def __call__(self) -> None:
        self._before_pass()
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self._parameters.have_changed():
            return
        fsdp.reshard(self._model)
        self._parameters = TrainableParameters(self._model)
        for parameter in self._parameters.trainable:
            if id(parameter) not in self._averaged and not is_sharded_tensor(parameter):
                self._averaged[id(parameter)] = parameter
                prepare_leaf(parameter, self._backend)


def _refuse_other_mesh(model: torch.nn.Module, mesh: Any) -> None:
    """Raise ``TrainingError`` if a model has tensor-parallel parameters that don't belong to ``mesh``."""
    parameter: Any
    for parameter in filter(is_sharded_tensor, model.parameters()):
        if mesh is None or torch_internals.root_mesh(parameter.device_mesh) is not torch_internals.root_mesh(mesh):
            raise TrainingError(
                f"{type(model).__name__} has layers that are spread over a mesh of their own, and can't be sharded "
                "over another one.",
                why="parallelize_module has made them, or they belong to a model that was prepared before.",
                fix="prepare models that share layers as one model; for parallelize_module, "
                "Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=..., tp_size=...)), whose "
                'accelerator.torch_device_mesh["tp"] parallelize_module takes',
            )


def unwrap_model(
    model: torch.nn.Module, *, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> torch.nn.Module:
    """Return a model as it was before ``prepare``, sharing its parameters with the prepared model, which still works.

    Args:
        model: A prepared model; any other is returned as it is.
        keep_fp32_wrapper: Keep autocast and outputs in float32. ``False`` returns an object that computes in the
            model's own precision and shares all attributes with the prepared model.
        keep_torch_compile: Return a model that was compiled before it was prepared as a compiled one.
    """
    unwrap = functools.partial(unwrap_model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)
    model = without_own_wrapper(model)
    compiled = compiled_from(model)
    if compiled is not None and (not keep_torch_compile or unwrap(compiled) is not compiled):
        return unwrap(compiled)
    if isinstance(model, (AveragingWrapper, DistributedDataParallel, torch.nn.DataParallel)):
        return unwrap(cast(torch.nn.Module, model.module))
    return model if keep_fp32_wrapper or not isinstance(model, _Autocasting) else model._plain()


class _Autocasting:
    """A model whose forward pass runs under autocast and returns float32, wherever it is called from.

    ``prepare`` replaces a model's class, in place, by a subclass of its own class and of this one. So the model stays
    the object that its parts, hooks and parents refer to, and ``unwrap_model`` can return it without autocast while
    training goes on. The model pickles as an object of its own class; a copy in this process autocasts as well.
    """

    _own: ClassVar[type[torch.nn.Module]]

    def __init_subclass__(cls) -> None:
        """Bypass the ``__init_subclass__`` of the model's own class, which may register its subclasses."""

    def _plain(self) -> torch.nn.Module:
        """Return the model without autocast: another object with the same attributes."""
        if "_own" not in vars(type(self)):  # another library has replaced the class since, and relies on its own
            return cast(torch.nn.Module, self)
        plain = object.__new__(self._own)
        object.__setattr__(plain, "__dict__", self.__dict__)
        return plain

    @contextlib.contextmanager
    def _as_its_own_class(self) -> Iterator[Any]:
        kind = type(self)
        _set_class(self, self._own)
        try:
            yield self
        finally:
            _set_class(self, kind)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with self._as_its_own_class() as model:
            copied = copy.deepcopy(model, memo)
        if type(copied) is self._own:
            _set_class(copied, type(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        with self._as_its_own_class() as model:
            reduced = model.__reduce_ex__(protocol)
        if isinstance(reduced, tuple) and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]  # not in typeshed
            # pickle requires that the object is an instance of the class that it creates.
            kind, *args = reduced[1]
            return kind.__new__, (kind, *args), *reduced[2:]
        return reduced


def _set_class(model: Any, kind: type) -> None:
    object.__setattr__(model, "__class__", kind)  # bypasses the model's own __setattr__


def _begin_autocasting(model: torch.nn.Module, autocast: Callable[[], Any]) -> None:
    given: Any = type(model)
    own: Any = given.__bases__[0] if is_parametrized(model) else given
    of_class = inspect.getattr_static(own, "forward")

    def autocasting(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with autocast():
                outputs = function(*args, **kwargs)
            return to_float32(outputs)

        return forward

    def forward_of(self: Any) -> Callable[..., Any]:
        return autocasting(vars(self).get("forward") or of_class.__get__(self, own))

    # An instance can have a forward of its own, as a compiled model does.
    is_plain = inspect.isfunction(of_class) and "forward" not in vars(model)
    names = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "_own": own,
        "forward": autocasting(of_class) if is_plain else property(forward_of, _set_own_forward),
    }
    bases = (own,) if issubclass(own, _Autocasting) else (_Autocasting, own)
    kind = types.new_class(own.__name__, bases, exec_body=lambda body: body.update(names))
    if given is not own:  # torch deletes a parametrization from the model's class, and at last goes back to its base
        body_of_given = {**vars(given), "_own": given}
        kind = types.new_class(given.__name__, (kind,), exec_body=lambda body: body.update(body_of_given))
    _set_class(model, kind)


def _set_own_forward(model: torch.nn.Module, forward: Callable[..., Any]) -> None:
    vars(model)["forward"] = forward
