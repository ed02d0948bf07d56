"""Hooks in torch that count the steps of any loop in a rank, measure their phases and report the loss.

The loss is the number whose gradients the program computes. A metric named ``loss`` that the program reports itself
takes its place.

This module never imports torch. The hooks are placed once torch is imported, usually by the template before the fork.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

from notebook_accel import code_places, environment, reporting
from notebook_accel.launching.ranks import profiling, progress, random_numbers
from notebook_accel.launching.ranks.import_hooks import when_imported
from notebook_accel.launching.ranks.phases import StepClock

_STREAM = 1  # torch's ``_DatasetKind.Iterable``
_main = threading.main_thread().ident
_progress = progress.PROGRESS
_profiler = profiling.PROFILER
_place = environment.RankPlace()


@functools.cache
def install() -> None:
    """Place the hooks now, or when torch is imported."""
    when_imported("torch.nn.modules.module", _patch_modules)
    when_imported("torch.nn.parallel.distributed", _patch_models)
    when_imported("torch.utils.data.dataloader", _patch_loaders)
    when_imported("torch.autograd", _patch_backward)
    when_imported("torch.optim.optimizer", _hook_optimizers)
    when_imported("torch.amp.grad_scaler", _patch_scaler)
    when_imported("accelerate.accelerator", _patch_accelerator)


def begin() -> None:
    """Count this rank's steps, and measure their phases unless the launch has ``profile="off"``."""
    global _place
    _place = environment.RankPlace.from_environment()  # the program may change the variables
    if os.environ.get(environment.PROFILE) != "off":
        _progress.clock = StepClock()
        _progress.clock.start()
    install()


def _measuring_clock() -> StepClock | None:
    """Return the clock if it measures what this thread does now, else ``None``."""
    clock = _progress.clock
    return clock if clock is not None and clock.is_on and threading.get_ident() == _main else None


def _patch_loaders(module: types.ModuleType) -> None:
    loader_class, iterator_class = module.DataLoader, module._BaseDataLoaderIter
    original_iter, original_next = loader_class.__iter__, iterator_class.__next__
    original_init = iterator_class.__init__
    are_gradients_enabled = sys.modules["torch"].is_grad_enabled

    @functools.wraps(original_iter)
    def __iter__(self: Any) -> Any:  # noqa: N807 - the name that stacks show
        with _measured_start(self, has_gradients=are_gradients_enabled()):
            iterator = original_iter(self)
        if isinstance(iterator, iterator_class):
            _progress.begin_loop(self, iterator)
        return iterator

    @functools.wraps(original_init)
    def __init__(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original_init(self, loader, *args, **kwargs)
        if self._dataset_kind != _STREAM:
            self._base_seed += random_numbers.worker_seed(loader) * self._num_workers
        if not isinstance(loader, loader_class):  # fastai's: a shell around the loader `d`, which isn't torch's
            _progress.begin_loop(getattr(loader, "d", loader), self)

    @functools.wraps(original_next)
    def __next__(self: Any) -> Any:  # noqa: N807
        loop: progress.LoopCounter | None = getattr(self, progress.ATTRIBUTE, None)
        if loop is None:
            return original_next(self)
        has_gradients = are_gradients_enabled()
        is_evaluation = _progress.evaluates(has_gradients=has_gradients, trains=loop.trains)
        clock, began_s = _measuring_clock(), 0.0
        if clock is not None:
            began_s = clock.enter("evaluation" if is_evaluation else "data")
        try:
            batch = original_next(self)
        except BaseException as raised:
            loop.has_ended = loop.has_ended or isinstance(raised, StopIteration)
            if clock is not None:
                clock.enter("other")
            raise
        if loop is not _progress.current:
            _progress.turn_to(loop, is_evaluation=is_evaluation or not has_gradients)
        loop.step += 1
        if loop.step == loop.total:
            _progress.losses_left = progress.LOSSES_PER_SAMPLE
        if _profiler.is_due and loop is _progress.current and not is_evaluation and threading.get_ident() == _main:
            _profiler.begin_step()
        if clock is not None:
            _begin_step(clock, loop, self, began_s, is_evaluation)
        return batch

    loader_class.__iter__, iterator_class.__next__, iterator_class.__init__ = __iter__, __next__, __init__


@contextlib.contextmanager
def _measured_start(loader: Any, *, has_gradients: bool) -> Iterator[None]:
    """Measure the start of an iteration, which starts the loader's workers, as a part of its wait for data."""
    clock = _measuring_clock()
    if clock is None:
        yield
        return
    is_evaluation = _progress.evaluates(has_gradients=has_gradients)
    before = clock.phase
    began_s = clock.enter("evaluation" if is_evaluation else "data")
    try:
        yield
    finally:
        ended_s = clock.enter(before or "other")
        if not is_evaluation and loader.num_workers and not loader.persistent_workers:
            clock.add_start(ended_s - began_s)


def _begin_step(
    clock: StepClock, loop: progress.LoopCounter, iterator: Any, began_s: float, is_evaluation: bool
) -> None:
    """Tell the clock that a training step or an evaluation begins with a batch, awaited since ``began_s``."""
    if is_evaluation:
        if loop.step == 1:
            clock.begin_evaluation()
        return
    now_s = clock.enter("forward")
    if loop.step == 1 and iterator._num_workers and not iterator._persistent_workers:
        clock.add_start(now_s - began_s)
    if loop is _progress.current:
        clock.begin_step(iterator._num_workers, iterator._dataset_kind == _STREAM)


def _patch_backward(module: types.ModuleType) -> None:
    original: Any = module.backward

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        _progress.trained += 1
        if _progress.losses_left:
            _progress.losses_left -= 1
            _report_loss(args[0] if args else kwargs.get("tensors"))
        clock = _measuring_clock()
        if clock is None:
            return original(*args, **kwargs)
        before = clock.phase
        began_s = clock.enter("backward")
        try:
            return original(*args, **kwargs)
        finally:
            # Within an optimizer's closure the optimizer goes on.
            ended_s = clock.enter(before if before in ("optimizer", "backward") else "other")
            clock.end_backward(ended_s - began_s)

    module.backward = backward  # type: ignore[attr-defined]


def _report_loss(differentiated: Any) -> None:
    loss = _progress.loss if _progress.loss is not None else differentiated
    loss = getattr(loss, reporting.LOSS_ATTRIBUTE, loss)
    is_dense = getattr(loss, "is_cpu", False) or getattr(loss, "is_cuda", False)
    # Reading a tensor that is made of others, such as a DTensor, may need all ranks.
    if is_dense and loss.numel() == 1 and not hasattr(loss, "__tensor_flatten__"):
        reporting.reporter().report_loss(loss.detach())


def _patch_scaler(module: types.ModuleType) -> None:
    original = module.GradScaler.scale

    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        scaled = original(self, outputs)
        if scaled is not outputs and hasattr(outputs, "detach"):
            setattr(scaled, reporting.LOSS_ATTRIBUTE, outputs.detach())
        return scaled

    module.GradScaler.scale = scale


def _patch_accelerator(module: types.ModuleType) -> None:
    """Report the loss before Accelerate's ``Accelerator`` divides it."""
    original = module.Accelerator.backward

    @functools.wraps(original)
    def backward(self: Any, loss: Any, **kwargs: Any) -> Any:
        _progress.loss = loss
        try:
            return original(self, loss, **kwargs)
        finally:
            _progress.loss = None

    module.Accelerator.backward = backward


def _hook_optimizers(module: types.ModuleType) -> None:
    def begin(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if (clock := _measuring_clock()) is not None:
            clock.enter("optimizer")

    is_first = True

    def end(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        nonlocal is_first
        if is_first and not _is_of_shapes(optimizer):
            is_first = False
            reporting.reporter().begin_training()
            _warn_of_unconnected_ranks(_place)
        is_step = _progress.step_optimizer(optimizer)
        if is_step and _profiler.is_due and threading.get_ident() == _main:
            _profiler.begin_step()
        if (clock := _measuring_clock()) is not None:
            clock.enter("forward" if _progress.is_alone else "other")
            if is_step:
                clock.begin_step(None)

    module.register_optimizer_step_pre_hook(begin)
    module.register_optimizer_step_post_hook(end)


def _is_of_shapes(optimizer: Any) -> bool:
    """Return whether an optimizer has parameters without values, as that of ``estimate_memory`` has."""
    return any(parameter.is_meta for group in optimizer.param_groups for parameter in group["params"])


def _warn_of_unconnected_ranks(place: environment.RankPlace) -> None:
    """Warn, on rank 0, if an optimizer steps before the ranks have made a process group of more than one."""
    distributed = sys.modules["torch"].distributed
    is_connected = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if place.world_size > 1 and place.rank == 0 and not is_connected and "torch_xla" not in sys.modules:
        code_places.warn(
            f"The {place.world_size} ranks aren't connected: each trains a model of its own, on all of the data. "
            "Fix: net, optimizer, loader = Accelerator().prepare(model, optimizer, loader), unless that is the plan"
        )


def _patch_models(module: types.ModuleType) -> None:
    model_class = module.DistributedDataParallel
    original = model_class.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        if _progress.clock is not None:
            _progress.clock.add_model(self)

    model_class.__init__ = __init__


def _patch_modules(module: types.ModuleType) -> None:
    """Notice ``model.eval()``: many programs disable gradients only inside the loop that evaluates."""
    original = module.Module.eval

    @functools.wraps(original)
    def eval(self: Any) -> Any:  # noqa: A001 - the name that stacks show
        _progress.note_evaluated(self)
        return original(self)

    module.Module.eval = eval
