"""Models: where they compute, in what precision, and how their gradients reach the other ranks."""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch.nn.parallel import DistributedDataParallel

from notebook_accel.training import collectives
from notebook_accel.training.accumulation import is_left_local
from notebook_accel.training.agreement import agree_on_model
from notebook_accel.training.handlers import DistributedDataParallelKwargs
from notebook_accel.training.precision import Precision
from notebook_accel.training.runtimes.runtime import Runtime
from notebook_accel.training.trees import to_float32

__all__ = ["is_compiled", "is_leaf", "prepare_leaf", "prepare_model", "unwrap_model"]


# What averages gradients and was made here; the user's own is left as it is.
_made_here: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def is_leaf(item: object) -> bool:
    """Whether it is a bare tensor that learns, in the place of a model."""
    return isinstance(item, torch.Tensor) and item.is_leaf and item.requires_grad


def prepare_leaf(leaf: torch.Tensor, runtime: Runtime, *, device_placement: bool = True) -> torch.Tensor:
    """The same tensor on the device, with rank 0's values, and a gradient that is averaged over the ranks."""
    if device_placement:
        runtime.place_leaf(leaf)  # in place, so that an optimizer that was made for it follows
    if runtime.place.world_size > 1:
        collectives.broadcast(runtime, leaf.data)
        register: Any = leaf.register_post_accumulate_grad_hook
        register(functools.partial(_average_gradient, runtime=runtime))
    return leaf


def _average_gradient(leaf: torch.Tensor, runtime: Runtime) -> None:
    if leaf.grad is not None and not is_left_local(leaf):
        mean = leaf.grad.contiguous()
        runtime.all_reduce(mean)
        leaf.grad.copy_(mean / runtime.place.world_size)


def prepare_model(
    model: torch.nn.Module,
    runtime: Runtime,
    precision: Precision,
    *,
    device_placement: bool = True,
    learns: bool = True,
    parallel: DistributedDataParallelKwargs | None = None,
    before_training_pass: Callable[[], None] | None = None,
) -> torch.nn.Module:
    """The model as training calls it: on the device, under autocast, gradients averaged over the ranks.

    With one rank and no mixed precision that is ``model`` itself. The model keeps its parameters, so optimizers that
    were made for it go on working.

    Args:
        model: What to prepare.
        runtime: The way to the other ranks.
        precision: What it computes in.
        device_placement: Move it to the rank's device.
        learns: Whether gradients are averaged, if any of its parameters requires one.
        parallel: How gradients are averaged.
        before_training_pass: Called before each forward pass that trains together with other ranks.

    Raises:
        CollectiveError: The ranks prepare different models, or one of them does something else.
    """
    # Prepared by another Accelerator, perhaps with another precision, or in a group that has ended since.
    if _autocast_view_in(model) is not None or model in _made_here:
        model = unwrap_model(model)
    if device_placement and not _has_its_place(model):
        runtime.place_model(model)
    prepared = model if precision.dtype is None else _autocast_view(model, precision.autocast)
    learns = learns and any(parameter.requires_grad for parameter in model.parameters())
    if runtime.place.world_size == 1 or not learns or isinstance(model, DistributedDataParallel):
        return prepared
    agree_on_model(runtime, model)
    distributed = runtime.data_parallel(prepared, parallel or DistributedDataParallelKwargs())
    _made_here.add(distributed)
    if before_training_pass is not None:
        # Not only before the backward pass: a forward pass, too, can wait for the other ranks.
        distributed.register_forward_pre_hook(functools.partial(_before_forward, before_training_pass))
    return distributed


def _has_its_place(model: torch.nn.Module) -> bool:
    """Return whether the library that has loaded a model has placed it, and refuses to move it.

    Transformers says so by these names: a model that is on several devices, or whose quantised weights belong to one.
    """
    for module in model.modules():
        own = vars(module)
        places = own.get("hf_device_map") or {}
        is_quantised = own.get("is_loaded_in_8bit") or own.get("is_loaded_in_4bit")
        if is_quantised or len(set(map(str, places.values()))) > 1 or (places and own.get("is_quantized")):
            return True
    return False


def _averages(model: Any) -> TypeGuard[DistributedDataParallel]:
    """Whether it is what averages the gradients of the model in it: torch's class, or what a runtime has instead."""
    return isinstance(model, DistributedDataParallel) or (isinstance(model, torch.nn.Module) and model in _made_here)


def _before_forward(before_training_pass: Callable[[], None], model: torch.nn.Module, _: Any) -> None:
    if model.training and torch.is_grad_enabled():
        before_training_pass()


def unwrap_model(
    model: torch.nn.Module, *, keep_fp32_wrapper: bool = False, keep_torch_compile: bool = True
) -> torch.nn.Module:
    """The model that was prepared, as it was: its own class, computing in its own precision.

    It shares its parameters with the prepared one, which goes on as before.

    Args:
        model: A prepared model, or one that wasn't, which is returned as it is.
        keep_fp32_wrapper: Return what computes under autocast and returns float32, without all else.
        keep_torch_compile: Return a model that was compiled before it was prepared as a compiled one.
    """
    unwrap = functools.partial(unwrap_model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)
    compiled = _compiled_from(model)
    if isinstance(model, _AutocastView):
        return model if keep_fp32_wrapper else unwrap(model._original)
    if compiled is not None and (not keep_torch_compile or unwrap(compiled) is not compiled):
        return unwrap(compiled)
    return unwrap(model.module) if _averages(model) else model


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` has made it."""
    return _compiled_from(model) is not None


def _compiled_from(model: torch.nn.Module) -> torch.nn.Module | None:
    """What ``torch.compile`` was given to make this. By name: importing its class takes longer than most launches."""
    return getattr(model, "_modules", {}).get("_orig_mod")  # a bare tensor has no modules


class _AutocastView:
    """The same model, called under autocast, with outputs in float32.

    A view is an object of its own, of a subclass of the model's class, whose attributes *are* the model's: both have
    one ``__dict__``. So the model isn't changed at all, unwrapping it in the middle of training doesn't change what
    training computes, and a view pickles and copies as the model.
    """

    __slots__ = ("_autocast", "_original")
    _autocast: Callable[[], Any]
    _original: torch.nn.Module

    def __init_subclass__(cls) -> None:
        """Keeps a view's class out of what the model's own class does with its subclasses, such as registering them."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._autocast():
            outputs = super().__call__(*args, **kwargs)  # type: ignore[misc]  # of the model's class, which comes next
        return to_float32(outputs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self._original,),)


def _autocast_view(model: torch.nn.Module, autocast: Callable[[], Any]) -> torch.nn.Module:
    own = type(model)
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__slots__": ()}
    kind = types.new_class(own.__name__, (_AutocastView, own), exec_body=lambda body: body.update(names))
    view: torch.nn.Module = object.__new__(kind)
    # Past the model's own __setattr__, which would register the model as a part of itself.
    object.__setattr__(view, "__dict__", model.__dict__)
    object.__setattr__(view, "_original", model)
    object.__setattr__(view, "_autocast", autocast)
    return view


def _autocast_view_in(model: torch.nn.Module) -> _AutocastView | None:
    inner = model.module if _averages(model) else model
    return inner if isinstance(inner, _AutocastView) else None
