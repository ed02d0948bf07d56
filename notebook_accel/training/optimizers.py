"""Optimizers and schedulers that step only when gradients sync."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR

from notebook_accel import code_places, torch_internals
from notebook_accel.errors import CheckpointError, TrainingError
from notebook_accel.payload.sharded_tensors import is_sharded_tensor
from notebook_accel.training import collectives, fsdp, gradients, process_group
from notebook_accel.training.accumulation import GradientState
from notebook_accel.training.backends import group_recovery
from notebook_accel.training.gradients import UncalledModels
from notebook_accel.training.precision import LossScaler

_WAITING = "_calls_waiting"  # an entry beside those of the scheduler's own state
_COMPARED_METRICS = 10  # the first ones of a scheduler
_by_metric = itertools.count()  # numbers of the schedulers that go by a metric; equal on all ranks that prepare alike


class AcceleratedOptimizer(torch.optim.Optimizer):
    """An optimizer whose ``step`` and ``zero_grad`` have an effect only at the end of an accumulation window.

    All other attributes are those of the wrapped optimizer. It pickles as the wrapped optimizer, since the wrapper is
    meaningless outside its rank.

    Args:
        optimizer: The optimizer to wrap.
        state: The accumulation window, which says whether gradients sync.
        scaler: The loss scaler of fp16.
        mark_step: Called after a step outside of any prepared loader. Inside of one, the next batch marks the step.

    Attributes:
        optimizer: The wrapped optimizer.
        step_was_skipped: True if the last step was skipped because a gradient overflowed in fp16.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        state: GradientState,
        scaler: LossScaler | None = None,
        mark_step: Callable[[], None] | None = None,
    ) -> None:
        # No call of the base class's __init__: parameters, state and hooks are those of the wrapped optimizer.
        self.optimizer = optimizer
        self.step_was_skipped = False
        self._gradients = state
        self._scaler = scaler
        self._mark_step = mark_step
        self._skipped_closures = False
        self._uncalled = UncalledModels(optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step if gradients sync and, in fp16, none has overflowed.

        Raises:
            TrainingError: There is a closure in fp16.
        """
        if not self._gradients.sync_gradients:
            self._skipped_closures = self._skipped_closures or closure is not None
            return None
        if gradients.REGISTERED or fsdp.ACCUMULATING:
            if closure is None:  # a closure computes the gradients itself
                self.average_uncalled()
            self._uncalled.has_stepped()
        if self._scaler is None:
            value = self.optimizer.step() if closure is None else self.optimizer.step(self._averaging(closure))
            self._gradients.is_unused = False
            if self._mark_step is not None and not self._gradients.in_dataloader:
                self._mark_step()
            return value
        if closure is not None:
            raise TrainingError(
                f"{type(self.optimizer).__name__} can't be stepped with a closure in fp16.",
                why="A step that calls the model again can't be undone when a gradient overflows.",
                fix="mixed_precision='bf16'",
            )
        self.step_was_skipped = self._scaler.step(self.optimizer)
        self._gradients.is_unused = False
        return None

    def _averaging(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Have a closure average its gradients.

        It returns the ranks' mean loss if the optimizer decides by it, as LBFGS's line search does.
        """

        def averaging() -> Any:
            self._gradients.is_unused = False  # what there is, this step uses
            loss = closure()
            if self._skipped_closures and self._gradients.is_unused:
                self._gradients.warn_of_closure()
            self.average_uncalled()
            decides = isinstance(self.optimizer, torch.optim.LBFGS) and isinstance(loss, torch.Tensor)
            return collectives.reduce(process_group.current(), loss.detach(), "mean") if decides else loss

        return averaging

    def average_uncalled(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Average gradients that no backward pass has averaged, before they are used. All ranks call this.

        Args:
            parameters: Average only gradients of models that have one of these parameters.
        """
        self._uncalled.average(parameters, may_be_local=not self._gradients.micro_batches)
        if fsdp.ACCUMULATING:
            fsdp.average_local_gradients(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, unless an accumulation window is still summing them."""
        if self._gradients.sync_gradients:
            self.optimizer.zero_grad(set_to_none)
            if fsdp.ACCUMULATING:
                fsdp.drop_local_gradients(_each_parameter([self]))

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped optimizer, but keep its own ``foreach`` settings.

        Raises:
            CheckpointError: The state lacks settings of this optimizer: it is that of another kind.
        """
        together = [group.get("foreach") for group in self.param_groups]
        # An optimizer around another may have further defaults, or none.
        own = [name for name in getattr(self, "defaults", ()) if all(name in group for group in self.param_groups)]
        self.optimizer.load_state_dict(state_dict)
        for group, foreach in zip(self.param_groups, together, strict=True):
            if "foreach" in group:
                group["foreach"] = foreach  # the saved one may be for parameters on other meshes
        missing = [name for name in own if any(name not in group for group in self.param_groups)]
        if missing:
            raise CheckpointError(
                f"The saved state is of another optimizer than {type(self.optimizer).__name__}: it has no "
                f"{', '.join(missing)}.",
                fix="make the optimizer as it was when it was saved; or prepare it after load_state, to begin anew",
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet: the object is being created
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self.optimizer,),)


class AcceleratedScheduler:
    """A scheduler that advances when the optimizer has stepped, in the units of one process.

    A schedule is planned in batches, and n ranks take n batches at once. So each call advances it n times, or once with
    ``split_batches``. All other attributes are those of the wrapped scheduler. It pickles as the wrapped scheduler.

    Args:
        scheduler: The scheduler to wrap.
        optimizers: The optimizers that it follows; it skips a step if one of them does.
        state: The accumulation window, which says whether gradients sync.
        steps_per_call: Steps of the schedule in each call.
        step_with_optimizer: Follow the optimizers; ``False`` passes each call on unchanged.

    Attributes:
        scheduler: The wrapped scheduler.
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizers: Sequence[AcceleratedOptimizer],
        state: GradientState,
        *,
        steps_per_call: int = 1,
        step_with_optimizer: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self._optimizers = optimizers
        self._gradients = state
        self._steps_per_call = steps_per_call
        self._step_with_optimizer = step_with_optimizer
        self._calls_waiting = 0
        self._ending = list(_ending_in(scheduler))

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule if the optimizer has stepped."""
        if not self._step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        self._calls_waiting += 1
        if not self._gradients.sync_gradients:
            return
        calls = self._calls_waiting if self._gradients.plugin.adjust_scheduler else 1
        self._calls_waiting = 0
        for optimizer in self._optimizers:
            if optimizer.step_was_skipped:
                return
        # The patience of ReduceLROnPlateau counts calls, not batches.
        steps = 1 if isinstance(self.scheduler, ReduceLROnPlateau) else calls * self._steps_per_call
        for _ in range(steps):
            for each in self._ending:
                if each.last_epoch >= each.total_steps:
                    return
            self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped scheduler's state, and the number of calls that wait for the end of the window."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return {**state, _WAITING: self._calls_waiting} if self._gradients.plugin.adjust_scheduler else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` or the wrapped scheduler has returned."""
        self._calls_waiting = state_dict.get(_WAITING, 0)
        self.scheduler.load_state_dict({name: value for name, value in state_dict.items() if name != _WAITING})

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not set yet: the object is being created
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"AcceleratedScheduler({self.scheduler!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self.scheduler,),)


class _SchedulerByMetric(AcceleratedScheduler):
    """A scheduler that goes by a metric. Rank 0 warns if ranks pass different ones: their learning rates part.

    No rank waits for another: each writes its metric to the ranks' store, and rank 0 reads what others wrote at their
    last call when it makes the next one.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._number = next(_by_metric)
        self._compared = 0
        self._last = "", 0.0  # the key of the last metric in the store, and the metric

    def step(self, metrics: Any, *args: Any, **kwargs: Any) -> None:
        if self._compared < _COMPARED_METRICS and dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # the rank that served the store has ended
                self._compare(float(metrics.detach() if isinstance(metrics, torch.Tensor) else metrics))
        super().step(metrics, *args, **kwargs)

    def _compare(self, metric: float) -> None:
        store = torch_internals.default_store()
        last, own = self._last
        for rank in range(1, dist.get_world_size() if last and dist.get_rank() == 0 else 0):
            theirs = float(store.get(f"{last}/{rank}")) if store.check([f"{last}/{rank}"]) else own
            if not (math.isclose(own, theirs, rel_tol=1e-6) or (math.isnan(own) and math.isnan(theirs))):
                code_places.warn(
                    f"Rank 0 has passed {own:g} to {type(self.scheduler).__name__}, rank {rank} {theirs:g}: their "
                    'learning rates part, and then their models. Fix: accelerator.reduce(loss, "mean") before '
                    "scheduler.step, or a metric of what gather_for_metrics returns"
                )
                self._compared = _COMPARED_METRICS
                return
        self._compared += 1
        # Calls of different numbers are never compared, such as after an interrupt that came between two ranks' calls.
        call = f"{self.scheduler.last_epoch}/{self._compared}/{code_places.describe(sys._getframe())}"
        self._last = f"notebook_accel/metric/{self._number}/{call}", metric
        store.set(f"{self._last[0]}/{dist.get_rank()}", repr(metric))


def _ending_in(scheduler: Any) -> Iterator[Any]:
    """Yield the schedules that raise after their ``total_steps``, as OneCycleLR does, also within those of others."""
    if getattr(scheduler, "total_steps", None) is not None:
        yield scheduler
    inner = getattr(scheduler, "_schedulers", [])
    # The earlier ones of a sequence end at its milestones, or raise without a prepare too.
    for each in inner[-1:] if isinstance(scheduler, SequentialLR) else inner:
        yield from _ending_in(each)


def prepare_optimizer(
    optimizer: torch.optim.Optimizer,
    state: GradientState,
    scaler: LossScaler | None,
    *,
    moves: bool = True,
    mark_step: Callable[[], None] | None = None,
) -> AcceleratedOptimizer:
    """Wrap an optimizer, and with ``moves`` move its state to the device of its parameters."""
    if isinstance(optimizer, AcceleratedOptimizer):  # prepared by another Accelerator
        optimizer = optimizer.optimizer
    fsdp.remap(optimizer)
    fsdp.separate_meshes(optimizer)
    if moves and _is_state_elsewhere(optimizer):
        optimizer.load_state_dict(optimizer.state_dict())  # knows which values belong on the device
    group_recovery.track_state(optimizer)
    if scaler is not None:
        scaler.add(optimizer)
    return AcceleratedOptimizer(optimizer, state, scaler, mark_step)


def refuse_unrelated(objects: Iterable[Any], prepared: Iterable[Any]) -> None:
    """Raise ``TrainingError`` if an optimizer in ``objects`` updates no parameter of any model in ``prepared``."""
    known = known_parameters(prepared)
    for item in objects:
        if isinstance(item, AcceleratedOptimizer) and known.isdisjoint(map(id, parameters_of([item]))):
            raise TrainingError(
                f"The optimizer {type(item.optimizer).__name__} was made for another model: none of the prepared "
                "models has a parameter that it updates.",
                why="Training would run and change nothing. It happens when a model is replaced by a trained one, "
                "such as by --pull model, and its optimizer isn't.",
                fix="make the optimizer for this model, or bring both back: --pull model,optimizer",
            )


def known_parameters(prepared: Iterable[Any]) -> set[int]:
    """Return the ``id`` of each prepared tensor and of each parameter of the prepared models."""
    known: set[int] = set()
    for item in prepared:
        known.update(map(id, item.parameters() if isinstance(item, torch.nn.Module) else [item]))
    return known


def _is_state_elsewhere(optimizer: torch.optim.Optimizer) -> bool:
    return any(
        isinstance(value, torch.Tensor) and value.ndim > 0 and value.device != parameter.device
        for parameter, values in optimizer.state.items()
        for value in values.values()
    )


def prepare_scheduler(
    scheduler: LRScheduler,
    optimizers: Sequence[AcceleratedOptimizer],
    state: GradientState,
    *,
    steps_per_call: int,
    step_with_optimizer: bool,
) -> AcceleratedScheduler:
    """Wrap a scheduler. It follows its own prepared optimizer, or all of them if its own isn't prepared."""
    group_recovery.track_state(scheduler)
    followed = [opt for opt in optimizers if scheduler.optimizer in (opt, opt.optimizer)] or list(optimizers)
    kind = _SchedulerByMetric if isinstance(scheduler, ReduceLROnPlateau) else AcceleratedScheduler
    return kind(scheduler, followed, state, steps_per_call=steps_per_call, step_with_optimizer=step_with_optimizer)


def parameters_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return all parameters of the optimizers."""
    return list(_each_parameter(optimizers))


def _each_parameter(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[torch.Tensor]:
    return (parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"])


def clip_grad_norm(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    optimizers: Sequence[AcceleratedOptimizer],
    state: GradientState,
    scaler: LossScaler | None,
) -> torch.Tensor:
    """Clip the gradients of a complete window to a total norm, and return the norm before clipping.

    Within a window, clip nothing and return the norm of the gradients so far.
    """
    parameters = fsdp.shards_of([parameters] if isinstance(parameters, torch.Tensor) else list(parameters))
    if state.sync_gradients:
        _finish_gradients(parameters, optimizers, scaler)
        if any(map(is_sharded_tensor, parameters)):
            return fsdp.clip_grad_norm(parameters, max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = fsdp.total_norm(gradients, norm_type)
    return norm if scaler is None else norm / scaler.factor


def clip_grad_value(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    clip_value: float,
    optimizers: Sequence[AcceleratedOptimizer],
    state: GradientState,
    scaler: LossScaler | None,
) -> None:
    """Clip each gradient of a complete window to ``[-clip_value, clip_value]``; within a window clip nothing."""
    if state.sync_gradients:
        parameters = fsdp.shards_of([parameters] if isinstance(parameters, torch.Tensor) else list(parameters))
        _finish_gradients(parameters, optimizers, scaler)
        for group in fsdp.by_mesh(parameters):
            torch.nn.utils.clip_grad_value_(group, clip_value)


def _finish_gradients(
    parameters: Sequence[torch.Tensor], optimizers: Sequence[AcceleratedOptimizer], scaler: LossScaler | None
) -> None:
    """Bring gradients to the values that the step uses: averaged over the ranks, and unscaled."""
    for optimizer in optimizers:
        optimizer.average_uncalled(parameters)
    unscale(optimizers, scaler)


def unscale(optimizers: Iterable[AcceleratedOptimizer], scaler: LossScaler | None) -> None:
    """Unscale fp16 gradients, unless they are unscaled already."""
    if scaler is not None:
        for optimizer in optimizers:
            scaler.unscale(optimizer.optimizer)
