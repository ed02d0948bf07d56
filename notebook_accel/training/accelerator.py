"""``Accelerator``: what training code holds. It owns the parts of the backend and hands each call to one of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from notebook_accel.training import (
    accumulation,
    data,
    forgotten,
    handlers,
    models,
    optimizers,
    process_group,
    profiling,
    random_state,
    refusals,
    schedule_hint,
)
from notebook_accel.training.accumulation import GradientAccumulationPlugin, GradientState
from notebook_accel.training.checkpoint import CUSTOM, Contents
from notebook_accel.training.checkpoint_folders import ProjectConfiguration
from notebook_accel.training.data import DataLoaderConfiguration
from notebook_accel.training.group_calls import GroupCalls
from notebook_accel.training.handlers import AutocastKwargs
from notebook_accel.training.loader_position import ACTIVE_ITERATIONS
from notebook_accel.training.loaders import DataLoaderShard, join_uneven_inputs, skip_first_batches
from notebook_accel.training.optimizers import AcceleratedOptimizer, AcceleratedScheduler
from notebook_accel.training.precision import Precision
from notebook_accel.training.profiling import ProfileKwargs
from notebook_accel.training.project import Project
from notebook_accel.training.settings import Settings
from notebook_accel.training.states import AcceleratorState

__all__ = ["Accelerator"]

_T = TypeVar("_T")


class Accelerator(GroupCalls, Project, Settings):
    """One rank of a training run.

    Making it joins the group that the environment describes; without one, this process trains alone. A further one in
    the same process uses the same group.

    Args:
        device_placement: Put models and batches on this rank's device.
        split_batches: The loaders' batch size is that of all ranks together. The same as in ``dataloader_config``.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``. By default what the launcher was told, else ``"no"``.
        gradient_accumulation_steps: Micro-batches that make one optimizer step, with ``accumulate``. Default: what the
            launch was told, or 1.
        gradient_accumulation_plugin: More about accumulation.
        dataloader_config: How loaders are prepared.
        cpu: Compute on the CPU, also where there are GPUs.
        log_with: Trackers for ``init_trackers``: ``"tensorboard"``, ``"jsonl"``, ``"all"``, an object, or a list.
        project_dir: The folder of checkpoints and logs. The same as in ``project_config``.
        project_config: More about it, such as numbered checkpoints.
        rng_types: Generators that get rank 0's state on every rank when an epoch begins, such as ``["torch"]``. Orders
            of samples agree without it.
        step_scheduler_with_optimizer: Advance schedulers only when optimizers step, and as far as one process would.
        downcast_bf16: On a TPU with bf16, have float32 replace float64 too.
        kwargs_handlers: Settings for torch: ``AutocastKwargs``, ``DistributedDataParallelKwargs``,
            ``GradScalerKwargs``, ``InitProcessGroupKwargs``.

    Attributes:
        gradient_state: Where training stands: ``sync_gradients``, ``end_of_dataloader``.
        state: This rank and its precision.

    Raises:
        ConfigError: An option was given a value that it can't have.
        TrainingError: The other ranks didn't come in time, or this one has no device.
    """

    def __init__(
        self,
        *,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        cpu: bool = False,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        rng_types: Iterable[Any] | None = None,
        step_scheduler_with_optimizer: bool = True,
        downcast_bf16: bool = False,
        kwargs_handlers: Iterable[object] | None = None,
        **others: Any,
    ) -> None:
        refusals.refuse(others)
        self._handlers = handlers.Handlers.of(kwargs_handlers)
        self._rng_types = random_state.check_rng_types(rng_types or ())
        plugin = accumulation.resolve(gradient_accumulation_steps, gradient_accumulation_plugin)
        config = dataloader_config or DataLoaderConfiguration()
        self._loading = config if split_batches is None else dataclasses.replace(config, split_batches=split_batches)
        backend = process_group.join(cpu=cpu, options=self._handlers.group)
        super().__init__(backend, project_dir=project_dir, configuration=project_config, log_with=log_with)
        self._precision = Precision(
            mixed_precision,
            self._backend.device,
            autocast=self._handlers.autocast,
            scaler=self._handlers.scaler,
            downcast_bf16=downcast_bf16,
            computes_in=self._backend.computes_in,
        )
        self.state = AcceleratorState.of(self._backend, self._precision)
        self.gradient_state = GradientState(plugin)
        self._device_placement = device_placement
        self._step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self._prepared: list[tuple[Any, Any]] = []
        self._has_begun = False

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Makes models, optimizers, loaders and schedulers ready for this rank.

        Models go to the device, compute under autocast and average their gradients over the ranks; loaders give each
        rank its share; optimizers and schedulers follow the accumulation of gradients. Other objects are passed
        through, and so is what was prepared before.

        Args:
            objects: What to prepare.
            device_placement: For each of them, whether it is put on the device; ``None`` as the Accelerator does it.

        Returns:
            The objects in the same order; a single one by itself.

        Raises:
            ConfigError: A loader can't be sharded, a dataset was given in place of one, or ``device_placement`` has
                another length.
            TrainingError: An optimizer comes with a model and moves no parameter of any prepared one.
        """
        data.refuse_data(objects)
        prepared, placed = objects, self._placements(objects, device_placement)
        for is_kind, prepare_one in self._kinds:
            pairs = zip(prepared, placed, strict=True)
            prepared = tuple(prepare_one(item, placement) if is_kind(item) else item for item, placement in pairs)
        if any(isinstance(item, torch.nn.Module) or models.is_leaf(item) for item in prepared):
            optimizers.refuse_strangers(prepared, [item for _, item in self._prepared])
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """``prepare`` for one model; one that is only evaluated doesn't average gradients."""
        prepare = functools.partial(
            models.prepare_model,
            device_placement=self._is_placed(device_placement),
            learns=not evaluation_mode,
            parallel=self._handlers.ddp,
            before_training_pass=self.gradient_state.refuse_to_wait_in_vain,
        )
        return self._once(model, lambda: prepare(model, self._backend, self._precision))

    def _prepare_leaf(self, leaf: torch.Tensor, device_placement: bool) -> torch.Tensor:
        return self._once(leaf, lambda: models.prepare_leaf(leaf, self._backend, device_placement=device_placement))

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """``prepare`` for one optimizer; unless ``device_placement=False``, its state goes where its parameters are."""
        moves, mark_step = self._is_placed(device_placement), self._backend.mark_step
        prepare = functools.partial(optimizers.prepare_optimizer, moves=moves, mark_step=mark_step)
        return self._once(optimizer, lambda: prepare(optimizer, self.gradient_state, self._precision.scaler))

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: object = None
    ) -> DataLoaderShard:
        """``prepare`` for one loader; ``slice_fn_for_dispatch`` isn't needed here, and refused."""
        data.refuse_slicing(slice_fn_for_dispatch)
        prepare = functools.partial(data.shard_dataloader, config=self._loading, rng_types=self._rng_types)
        device = self.device if self._is_placed(device_placement) else None
        return self._once(data_loader, lambda: prepare(data_loader, backend=self._backend, device=device))

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """``prepare`` for one scheduler. Its optimizer has to be prepared before."""
        steps = 1 if self._loading.split_batches else self.num_processes
        follows = self._step_scheduler_with_optimizer

        def prepare() -> AcceleratedScheduler:
            if self.is_main_process and follows:
                schedule_hint.say(scheduler, ranks=steps, window=self.gradient_accumulation_steps)
            return optimizers.prepare_scheduler(
                scheduler, self._optimizers, self.gradient_state, steps_per_call=steps, step_with_optimizer=follows
            )

        return self._once(scheduler, prepare)

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """A loader of the same batches without the first ``num_batches``, to go on in the middle of an epoch."""
        return skip_first_batches(dataloader, num_batches)

    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """A context in which ranks that have no further batch take part in what the others do.

        Args:
            joinables: The prepared models that are trained in there.
            even_batches: What holds for the prepared loaders in there; by default what they were prepared with.
        """
        if self.num_processes == 1:
            return contextlib.nullcontext()
        even = self._loading.even_batches if even_batches is None else even_batches
        loaders = [prepared for _, prepared in self._prepared if isinstance(prepared, DataLoaderShard)]
        return join_uneven_inputs(joinables, even, loaders=loaders, state=self.gradient_state)

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """The model that was prepared, as it was. Training can go on with the prepared one.

        Args:
            model: A prepared model; any other is returned as it is.
            keep_fp32_wrapper: Return it so that it still computes in mixed precision; ``False`` returns it computing
                in its own, with the same weights.
            keep_torch_compile: Return a model that was compiled before it was prepared as a compiled one.
        """
        return models.unwrap_model(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forgets all that was prepared and a window that has begun, and gives unused device memory back.

        Returns:
            As many ``None`` as there are arguments, to overwrite the caller's names with.
        """
        self._prepared.clear()
        self.gradient_state.reset()
        gc.collect()
        self._backend.release_memory()
        return [None] * len(objects)

    clear = free_memory

    def end_training(self) -> None:
        """Ends trackers, forgets all that was prepared and leaves the group.

        The group ends with the last Accelerator of this process.
        """
        self._finish_trackers()
        self.free_memory()
        self._backend.leave()

    # One step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """``loss.backward(**kwargs)``, divided by the length of the accumulation window and scaled for fp16.

        Raises:
            CollectiveError: Another rank didn't come to average the gradients; says where each was.
        """
        if not self._has_begun:
            self._begin()
        loss = self.gradient_state.divide(loss, lambda: optimizers.parameters_of(self._optimizers))
        scaled: Any = loss if self._precision.scaler is None else self._precision.scaler.scale(loss)
        ACTIVE_ITERATIONS.upload_next()
        try:
            scaled.backward(**kwargs)
        except RuntimeError as error:
            self._backend.explain(error)
            raise

    def _begin(self) -> None:
        self._has_begun = True
        if self.is_main_process:
            prepared = [item for _, item in self._prepared]
            window = self.gradient_accumulation_steps if self.gradient_state.is_counting else 1
            scales = self._precision.scaler is not None
            forgotten.warn(prepared, ranks=self.num_processes, window=window, scales=scales)

    def accumulate(self, *models: Any) -> contextlib.AbstractContextManager[None]:
        """One micro-batch, around its forward and backward pass and the optimizer's step.

        Gradients add up, each rank's for itself, until ``gradient_accumulation_steps`` micro-batches are done or the
        loader ends; only then they are averaged over the ranks, and optimizers and schedulers step.
        """
        return self.gradient_state.accumulate(models)

    def no_sync(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """A context in which the backward pass leaves ``model``'s gradients local to this rank."""
        return accumulation.no_sync(model)

    def trigger_sync_in_backward(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """A context in which the backward pass averages gradients although the forward pass was in ``no_sync``.

        Raises:
            TrainingError: The model was prepared to find unused parameters, which only a forward pass finds.
        """
        return accumulation.sync_in_backward(model)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        """A context that computes in mixed precision, for what happens outside of a prepared model."""
        return self._precision.autocast(autocast_handler)

    def unscale_gradients(self, optimizer: AcceleratedOptimizer | Sequence[AcceleratedOptimizer] | None = None) -> None:
        """Brings the gradients of a window that ends here back to their real size; only fp16 scales them.

        Args:
            optimizer: One or several prepared ones; by default all.
        """
        if self.sync_gradients:
            chosen = self._optimizers if optimizer is None else optimizer
            optimizers.unscale(chosen if isinstance(chosen, Sequence) else [chosen], self._precision.scaler)

    def profile(self, profile_handler: ProfileKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        """Runs torch's profiler around the body, and gives it to the body as ``with ... as``."""
        return profiling.profile(profile_handler or self._handlers.profile, self.process_index)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clips gradients to a total norm where they sync, and returns the norm that they had before.

        Can be called for every micro-batch: within a window it clips nothing and returns the norm so far.
        """
        clip = functools.partial(optimizers.clip_grad_norm, parameters, max_norm, norm_type)
        return clip(optimizers=self._optimizers, state=self.gradient_state, scaler=self._precision.scaler)

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clips gradients to ``[-clip_value, clip_value]`` where they sync. Can be called for every micro-batch."""
        clip = functools.partial(optimizers.clip_grad_value, parameters, clip_value)
        clip(optimizers=self._optimizers, state=self.gradient_state, scaler=self._precision.scaler)

    # Where training stands

    @property
    def sync_gradients(self) -> bool:
        """True if this micro-batch ends an accumulation window."""
        return self.gradient_state.sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches that make one optimizer step. Can be set between two windows."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.change_steps(steps)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if an optimizer left out its last step because a gradient overflowed in fp16."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def _contents(self) -> Contents:
        prepared = [item for _, item in self._prepared]
        states: dict[str, list[Any]] = {
            "optimizer": [*self._optimizers],
            "scheduler": [item for item in prepared if isinstance(item, AcceleratedScheduler)],
            "scaler": [] if self._precision.scaler is None else [self._precision.scaler],
            CUSTOM: self._registered,
        }
        models = [item for item in prepared if isinstance(item, torch.nn.Module)]
        loaders = [item for item in prepared if isinstance(item, DataLoaderShard)]
        return Contents(models, states, loaders, self.gradient_state)

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        return [prepared for _, prepared in self._prepared if isinstance(prepared, AcceleratedOptimizer)]

    @property
    def _kinds(self) -> tuple[tuple[Callable[[Any], bool], Callable[[Any, bool], Any]], ...]:
        """What is prepared, in this order, and how."""
        return (
            (_is_a(torch.nn.Module), self.prepare_model),  # first: optimizers follow where their parameters have gone
            (models.is_leaf, self._prepare_leaf),
            (_is_a(torch.optim.Optimizer), self.prepare_optimizer),
            (_is_a(DataLoader), self.prepare_data_loader),
            # Last: each looks for its optimizer among the prepared ones.
            (_is_a(LRScheduler), lambda scheduler, _: self.prepare_scheduler(scheduler)),
        )

    def _once(self, given: Any, prepare: Callable[[], _T]) -> _T:
        """What ``given`` was prepared as before, or is now."""
        for original, prepared in self._prepared:
            if given is original or given is prepared:
                already: _T = prepared
                return already
        new = prepare()
        self._prepared.append((given, new))
        return new


def _is_a(kind: type) -> Callable[[Any], bool]:
    return lambda item: isinstance(item, kind)
