"""Rank 0's warnings about unprepared objects and fast schedules, with which training runs, but not as expected."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from notebook_accel import code_places, environment
from notebook_accel.payload.sharded_tensors import is_sharded_tensor
from notebook_accel.training import gradients, optimizers
from notebook_accel.training.loader_position import ACTIVE_ITERATIONS
from notebook_accel.training.sharding import Tail
from notebook_accel.training.trees import leaves_of

_LENGTHS = ("total_steps", "T_max", "total_iters")  # attributes of torch's schedulers that hold their planned length


@dataclasses.dataclass
class _Wait:
    """The wait of an ``Accelerator`` for its first training step."""

    prepared_by: Callable[[Any], Sequence[Any]]
    begin: Callable[[Any, torch.optim.Optimizer], None]
    others: weakref.WeakSet[torch.optim.Optimizer] = dataclasses.field(default_factory=weakref.WeakSet)


_untrained: weakref.WeakKeyDictionary[Any, _Wait] = weakref.WeakKeyDictionary()
_hooks: list[Any] = []  # the handle of the hook in torch, while any waits


def await_training(
    accelerator: Any,
    prepared_by: Callable[[Any], Sequence[Any]],
    begin: Callable[[Any, torch.optim.Optimizer], None],
) -> None:
    """Have an ``Accelerator`` warn after the first step too, for programs that call ``loss.backward()``.

    It calls this again when it has prepared further objects.

    Args:
        accelerator: The Accelerator, held weakly.
        prepared_by: Returns the objects that the Accelerator has prepared.
        begin: Called with the Accelerator and the first optimizer that steps and moves one of these objects.
    """
    _untrained[accelerator] = _Wait(prepared_by, begin)
    if not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_note_step))


def end_wait(accelerator: Any) -> None:
    """Undo ``await_training``, since training has begun."""
    _untrained.pop(accelerator, None)
    while _hooks and not _untrained:  # later steps pay nothing
        _hooks.pop().remove()


def _note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if torch.compiler.is_compiling():  # the step of an optimizer can be compiled
        return
    moved = optimizers.parameters_of([optimizer])
    for accelerator, wait in list(_untrained.items()):
        if optimizer in wait.others:
            continue
        prepared = wait.prepared_by(accelerator)
        trained = optimizers.parameters_of(item for item in prepared if isinstance(item, torch.optim.Optimizer))
        known = optimizers.known_parameters([*prepared, *trained])
        if known.isdisjoint(map(id, moved)):
            wait.others.add(optimizer)
        elif any(parameter.grad is not None for parameter in moved):
            wait.begin(accelerator, optimizer)


def warn(
    prepared: Sequence[Any], *, ranks: int, window: int, scales: bool, stepped: torch.optim.Optimizer | None
) -> None:
    """Warn, at the first backward pass, about each kind of object that should be prepared and isn't.

    ``window`` is the number of micro-batches in a step of the optimizer if ``accumulate`` counts them, else 1.
    ``scales`` is true if losses are scaled, as in fp16. ``stepped`` is the optimizer whose step, after a backward pass
    that wasn't ``Accelerator.backward``, shows that training has begun.
    """
    prepared_optimizers: list[Any] = [item for item in prepared if isinstance(item, torch.optim.Optimizer)]
    if window > 1 and stepped is not None and any(item.optimizer is stepped for item in prepared_optimizers):
        code_places.warn(
            f"loss.backward() sums the gradients of the {window} micro-batches of a step. "
            "Fix: accelerator.backward(loss), which averages them, unless you divide the loss yourself"
        )
    models = [item for item in prepared if hasattr(type(item), "_own_parameters")]
    if (
        ranks > 1
        and models
        and not prepared_optimizers
        and not any(each._passes.calls or each._passes.local for each in models)
    ):
        code_places.warn(
            "The prepared model isn't called, and no optimizer has been prepared: each of the "
            f"{ranks} ranks trains a model of its own. Fix: call the model that accelerator.prepare returned, unless "
            "something else averages its gradients"
        )
    if ranks > 1 and not any(isinstance(item, (torch.nn.Module, torch.Tensor)) for item in prepared):
        code_places.warn(
            f"No model has been prepared: each of the {ranks} ranks trains a model of its own. "
            "Fix: model = accelerator.prepare(model), unless it averages its gradients itself"
        )
    for optimizer in prepared_optimizers if ranks > 1 else ():
        shapes = _unprepared_shapes(optimizer, prepared)
        if shapes:
            code_places.warn(
                f"The optimizer updates parameters that haven't been prepared, of shape {shapes}: each of the {ranks} "
                "ranks trains its own. Fix: prepare the module that has them, or the parameter: "
                "accelerator.prepare(model, parameter, ...), unless something else averages their gradients"
            )
    if (window > 1 or scales) and not prepared_optimizers:
        effect = f"would step in each of {window} micro-batches" if window > 1 else "would step with scaled gradients"
        code_places.warn(
            f"No optimizer has been prepared: it {effect}. Fix: optimizer = accelerator.prepare(optimizer)"
        )
    if ranks > 1 and not any(isinstance(item, DataLoader) for item in prepared):
        code_places.warn(
            f"No loader has been prepared: each of the {ranks} ranks works on all of the data. "
            "Fix: loader = accelerator.prepare(loader), unless it gives each rank a share itself"
        )


def _unprepared_shapes(optimizer: torch.optim.Optimizer, prepared: Sequence[Any]) -> str:
    """Return the shapes of an optimizer's unprepared parameters, such as a loss's; ``""`` if none or all are."""
    known = optimizers.known_parameters(prepared) | set(map(id, gradients.registered_parameters()))
    moved = optimizers.parameters_of([optimizer])
    unprepared = [parameter for parameter in moved if id(parameter) not in known and parameter.requires_grad]
    unprepared = [parameter for parameter in unprepared if not is_sharded_tensor(parameter)]
    if len(unprepared) == len(moved):
        return ""
    shapes = [str(tuple(parameter.shape)) for parameter in unprepared]
    return ", ".join(shapes if len(shapes) <= 3 else [*shapes[:3], "..."])


def warn_of_late(kind: str) -> None:
    """Warn that an object was prepared after ``load_state``, so that its saved state wasn't loaded."""
    code_places.warn(
        f"The {kind} was prepared after load_state, so it begins anew, although the checkpoint has a state for it. "
        "Fix: prepare all objects, then load_state"
    )


def warn_of_second_skip() -> None:
    """Warn, at the first backward pass, if the program has skipped as many batches as ``load_state`` had skipped."""
    current = ACTIVE_ITERATIONS.training
    resumed = None if current is None else current.loader.position.resumed
    if current is None or resumed is None:
        return
    in_epoch = current.loader.position.epochs.running == resumed.epoch
    passed = (current.counter.step - 1 if in_epoch else resumed.length or 0) - resumed.batches
    if passed > 1 and (passed == resumed.batches if in_epoch else passed <= resumed.batches):
        code_places.warn(
            f"load_state resumed epoch {resumed.epoch} after its first {resumed.batches} batches, and the program has "
            f"skipped {passed} more. Fix: leave out what skips them in the loop, or set "
            f"{environment.COMPAT}=accelerate in the environment"
        )


def warn_of_late_gather(gathered: Any) -> None:
    """Warn once if ``gather_for_metrics`` is called after a loop, with the rows of all of its batches."""
    moment, samples, tail = ACTIVE_ITERATIONS.ended or (None, 0, Tail((), ()))
    repeated = sum(tail.sizes) - tail.real
    if moment != ACTIVE_ITERATIONS.moment or samples < 2 or not repeated:
        return
    outer = ACTIVE_ITERATIONS.current
    if outer is not None and samples % (outer.loader.total_batch_size // len(tail.sizes) or 1) == 0:
        return  # they can be rows of the batch of a loop around that loop
    lengths = {len(leaf) for leaf in leaves_of(gathered) if isinstance(leaf, torch.Tensor) and leaf.ndim}
    if samples in lengths or (isinstance(gathered, list) and samples == len(gathered)):
        ACTIVE_ITERATIONS.ended = None
        code_places.warn(
            f"gather_for_metrics after the loop leaves nothing out, and {repeated} of the samples were repeated so "
            "that all ranks have as many. Fix: call it in the loop, once for each batch"
        )


def log_schedule_hint(scheduler: LRScheduler, *, ranks: int, window: int) -> None:
    """Log ``schedule_hint`` if there is one."""
    text = schedule_hint(scheduler, ranks=ranks, window=window)
    if text:
        logging.getLogger("notebook_accel").warning(text)


def schedule_hint(scheduler: LRScheduler, *, ranks: int, window: int) -> str:
    """Describe how fast a schedule advances and when it ends; return ``""`` if it advances as in one process.

    Each step of the optimizer takes ``window`` micro-batches, and advances the schedule by ``ranks`` steps.
    """
    if ranks == 1 or isinstance(scheduler, ReduceLROnPlateau):
        return ""
    name = type(scheduler).__name__
    text = f"With {ranks} ranks, each step of the optimizer advances {name} by {ranks}"
    lengths = [getattr(scheduler, attribute) for attribute in _LENGTHS if hasattr(scheduler, attribute)]
    if not lengths:
        return f"{text}."
    length = int(lengths[0])
    steps = -(-length // ranks)
    batches = f", {steps * window} batches of each rank" if window > 1 else ""
    return f"{text}: its {length} steps end after {steps} steps of the optimizer{batches}."
