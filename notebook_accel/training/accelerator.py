"""``Accelerator``, the class that training code uses. Its methods delegate to one module for each area."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import gc
import operator
import os
import pathlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from notebook_accel import refusals, reporting
from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.training import (
    accumulation,
    checkpoint,
    checkpoint_folders,
    checkpoint_saving,
    collectives,
    compiling,
    data,
    fsdp,
    gradients,
    handlers,
    memory_estimate,
    model_files,
    models,
    optimizers,
    parallelism,
    process_group,
    random_state,
    stopping,
    tracking,
    unprepared_warnings,
)
from notebook_accel.training.accumulation import GradientAccumulationPlugin, GradientState
from notebook_accel.training.checkpoint import CheckpointState
from notebook_accel.training.checkpoint_folders import ProjectConfiguration
from notebook_accel.training.compiling import TorchDynamoPlugin
from notebook_accel.training.data import DataLoaderConfiguration
from notebook_accel.training.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accel.training.fsdp_plugin import of_launch as fsdp_plugin_of_launch
from notebook_accel.training.handlers import AutocastKwargs, ProfileKwargs
from notebook_accel.training.loader_position import ACTIVE_ITERATIONS
from notebook_accel.training.loaders import DataLoaderShard, join_uneven_inputs, skip_first_batches
from notebook_accel.training.optimizers import AcceleratedOptimizer, AcceleratedScheduler
from notebook_accel.training.parallelism import ParallelismConfig
from notebook_accel.training.precision import LossScaler, Precision
from notebook_accel.training.states import AcceleratorState, DistributedType, ProcessState
from notebook_accel.training.trackers import NotOnThisRank

_T = TypeVar("_T")
_Path = str | os.PathLike[str]


def _loading_setting(name: str) -> Any:
    return property(operator.attrgetter(f"dataloader_config.{name}"), doc="The setting of ``DataLoaderConfiguration``.")


class Accelerator(ProcessState):
    """One rank of a training run.

    The first Accelerator of a process joins the process group that the environment variables describe, or trains alone
    if there is none. Later ones use the same group.

    Args:
        device_placement: Put models and batches on this rank's device.
        split_batches: Divide the loaders' batch size among the ranks, as in ``dataloader_config``.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``. Default: the launch's setting, or ``"no"``.
        gradient_accumulation_steps: Micro-batches that make one optimizer step, with ``accumulate``. Default: the
            launch's setting, or 1.
        cpu: Compute on the CPU, even where there are GPUs.
        dataloader_config: Settings of prepared loaders.
        deepspeed_plugin: Refused with a ``ConfigError``.
        fsdp_plugin: Shard models over the ranks with these settings. Default: the launch's setting, or no sharding.
        torch_tp_plugin: Refused.
        megatron_lm_plugin: Refused.
        rng_types: Random generators to synchronise from rank 0 at the start of each epoch, such as ``["torch"]``. Ranks
            agree on the order of samples even without this.
        log_with: Trackers for ``init_trackers``: the name of a library such as ``"tensorboard"``, ``"wandb"`` or
            ``"mlflow"``; ``"jsonl"``; ``"all"`` for all that are installed; your own tracker; or a list of these.
        project_dir: The folder of checkpoints and logs, as in ``project_config``.
        project_config: Further settings of that folder, such as numbered checkpoints.
        gradient_accumulation_plugin: Further settings of accumulation.
        step_scheduler_with_optimizer: Step schedulers only when optimizers step, and as far as one process would.
        kwargs_handlers: Settings for torch: ``AutocastKwargs``, ``DistributedDataParallelKwargs``,
            ``GradScalerKwargs``, ``InitProcessGroupKwargs``, ``ProfileKwargs``.
        dynamo_backend: Compile models with this backend of ``torch.compile``, such as ``"inductor"``. Default: the
            launch's setting, or ``"no"``.
        dynamo_plugin: Further settings of ``torch.compile``, in place of ``dynamo_backend``.
        deepspeed_plugins: Refused.
        parallelism_config: Numbers of ranks for replicas, shards and tensor parallelism. Default: the launch's setting,
            or plain data parallelism.
        downcast_bf16: On a TPU with bf16, also replace float64 by float32.
        save_on_end: Save the state and exit before the time limit: the checkpoint's folder, or ``True`` for the next
            numbered one of ``project_config``. All ranks save after the same batch of a prepared loader, one on which
            ``backward`` was called.

    Attributes:
        gradient_state: The accumulation window: ``sync_gradients``, ``end_of_dataloader``.
        state: This rank and its precision.
        dataloader_config: How later ``prepare`` calls read data: a copy of what was given.
        project_configuration: The folders of the run.
        trackers: The trackers that ``log`` writes to, on rank 0 after ``init_trackers``.
        before_save: Functions that ``save_state`` calls on every rank before it looks at any state.

    Raises:
        ConfigError: An option has an invalid value, or a tracker isn't installed or has no folder.
        TrainingError: The other ranks didn't join in time, or this rank has no device.
    """

    # Programs that support other ways to spread a model over devices check these first.
    deepspeed_plugin: None = None
    parallelism_config: ParallelismConfig | None = None
    is_composable_parallelism_enabled = False

    def __init__(
        self,
        device_placement: bool = True,  # in Accelerate's order, since programs pass some arguments by position
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: object = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: object = None,
        megatron_lm_plugin: object = None,
        rng_types: Iterable[Any] | None = None,
        log_with: Any = None,
        project_dir: _Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Iterable[object] | None = None,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: object = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        downcast_bf16: bool = False,
        save_on_end: _Path | bool = False,
    ) -> None:
        refusals.refuse_arguments(
            deepspeed_plugin=deepspeed_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            deepspeed_plugins=deepspeed_plugins,
        )
        self._handlers = handlers.Handlers.from_list(kwargs_handlers)
        self._rng_types = random_state.check_rng_types(rng_types or ())
        plugin = accumulation.resolve(gradient_accumulation_steps, gradient_accumulation_plugin)
        self.dataloader_config = copy.copy(dataloader_config or DataLoaderConfiguration())
        if split_batches is not None:
            self.dataloader_config.split_batches = split_batches
        super().__init__(process_group.join(cpu=cpu, options=self._handlers.group))
        self.trackers: list[Any] = []
        self._open_project(project_dir, project_config, log_with, save_on_end)
        self._precision = Precision(
            mixed_precision,
            self._backend.device,
            autocast=self._handlers.autocast,
            scaler=self._handlers.scaler,
            downcast_bf16=downcast_bf16,
            computes_in=self._backend.computes_in,
        )
        self._open_mesh(fsdp_plugin_of_launch(fsdp_plugin), parallelism_config)
        self.state = AcceleratorState.from_accelerator(self._backend, self._precision, self._sharding)
        self.state.parallelism_config, self.state.device_mesh = self.parallelism_config, self.torch_device_mesh
        self._dynamo = self.state.dynamo_plugin = compiling.resolve(dynamo_backend, dynamo_plugin)
        self.gradient_state = GradientState(plugin)
        self._device_placement = device_placement
        self._step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self._memory_reports = memory_estimate.ModelMemoryReports(self._backend.device)
        self._forget_prepared()
        self._has_begun = False
        self._await_training()

    # Settings

    def _open_mesh(self, plugin: FullyShardedDataParallelPlugin | None, given: ParallelismConfig | None) -> None:
        config = self.parallelism_config = parallelism.resolve(given, plugin, self._backend.place)
        _ = self.torch_device_mesh  # all ranks create the mesh together
        is_sharded = config is not None and config.dp_shard_enabled
        self._sharding = plugin or (FullyShardedDataParallelPlugin() if is_sharded else None)
        self._ranks_per_sample = 1 if config is None else config.non_data_parallel_size

    @property
    def torch_device_mesh(self) -> Any:
        """The ``DeviceMesh`` of the ranks, with the names in ``parallelism_config``; ``None`` without one."""
        config = self.parallelism_config
        return None if config is None or not config.sizes else self._backend.mesh(config.sizes, config.joint_dimensions)

    @property
    def tensor_parallel_rank(self) -> int:
        """This rank's index in its tensor-parallel group, from 0."""
        return self._rank_in("tp")

    @property
    def data_parallel_rank(self) -> int:
        """The index of the model replica that this rank belongs to, from 0."""
        return self._rank_in("dp_replicate")

    @property
    def data_parallel_shard_rank(self) -> int:
        """This rank's index among the ranks that shard one replica, from 0."""
        return self._rank_in("dp_shard")

    def _rank_in(self, dimension: str) -> int:
        if self.torch_device_mesh is None:
            raise TrainingError("The ranks have no mesh.", fix="Accelerator(parallelism_config=ParallelismConfig(...))")
        mesh = self.torch_device_mesh
        return int(mesh.get_local_rank(dimension)) if dimension in mesh.mesh_dim_names else 0

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"bf16"`` or ``"fp16"``."""
        return self._precision.name

    split_batches: bool = _loading_setting("split_batches")
    dispatch_batches: bool | None = _loading_setting("dispatch_batches")
    even_batches: bool = _loading_setting("even_batches")
    use_seedable_sampler: bool = _loading_setting("use_seedable_sampler")
    non_blocking: bool = _loading_setting("non_blocking")
    use_stateful_dataloader: bool = _loading_setting("use_stateful_dataloader")

    @property
    def distributed_type(self) -> DistributedType:
        """The kind of the ranks' devices; ``FSDP`` if models are sharded, and ``NO`` for a single rank."""
        return self.state.distributed_type

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded over the ranks."""
        return self.distributed_type is DistributedType.FSDP

    @property
    def multi_device(self) -> bool:
        """True if there are several ranks and they have GPUs."""
        return self.use_distributed and self.device.type == "cuda"

    @property
    def should_save_model(self) -> bool:
        """True on the rank that writes weights."""
        return self.is_main_process

    @property
    def sync_gradients(self) -> bool:
        """True if this micro-batch ends an accumulation window. Programs that count batches themselves may set it."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state._set_sync_gradients(sync_gradients)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches in one optimizer step. The number can be changed."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, steps: int) -> None:
        self.gradient_state.change_steps(steps)

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler of fp16, with the methods of torch's ``GradScaler``; ``None`` in another precision."""
        return self._precision.scaler

    @property
    def native_amp(self) -> bool:
        """True if models compute under autocast."""
        return self._precision.dtype is not None

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if an optimizer skipped its last step because a gradient overflowed in fp16."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    # Preparing

    def prepare(self, *objects: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Make models, optimizers, loaders and schedulers ready for this rank.

        Models move to the device, compute under autocast and average their gradients over the ranks; ``fsdp_plugin``
        shards them instead, which replaces their parameters. Loaders give each rank its shard of the data. Optimizers
        and schedulers step only where gradients sync. Objects of other types, and prepared ones, are returned as is.

        Args:
            objects: The objects to prepare.
            device_placement: For each object, whether to move it to the device; ``None`` is the Accelerator's setting.

        Returns:
            The prepared objects in the same order, or the object itself if there is only one.

        Raises:
            ConfigError: A loader can't be sharded, a dataset was given in place of a loader, or ``device_placement``
                has another length.
            TrainingError: An optimizer is passed with a model and updates no parameter of any prepared model.
        """
        data.refuse_data(objects)
        if self._sharding is not None and self.is_main_process:
            copies = (self.parallelism_config or ParallelismConfig()).copies
            memory_estimate.warn_of_large_models(
                objects, self._backend, self._sharding, copies=copies, mixed_precision=self.mixed_precision
            )
        prepared, placed = objects, self._placements(objects, device_placement)
        in_order: tuple[tuple[type, Callable[[Any, bool], Any]], ...] = (
            (torch.nn.Module, self.prepare_model),  # first, since optimizers need their parameters' new devices
            (torch.Tensor, self._prepare_leaf),
            (torch.optim.Optimizer, self.prepare_optimizer),
            (DataLoader, self.prepare_data_loader),
            # Last, since each looks for its optimizer among the prepared ones.
            (LRScheduler, lambda scheduler, _: self.prepare_scheduler(scheduler)),
        )
        for kind, prepare_one in in_order:
            pairs = zip(prepared, placed, strict=True)
            prepared = tuple(
                prepare_one(item, placement) if isinstance(item, kind) else item for item, placement in pairs
            )
        if any(isinstance(item, torch.nn.Module) or models.is_leaf(item) for item in prepared):
            optimizers.refuse_unrelated(prepared, self._all_prepared)
        self._memory_reports.track(self._models, [prepared.optimizer for prepared in self._optimizers])
        reporting.reporter().begin_training()
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare one model. In ``evaluation_mode`` its gradients aren't averaged, unless it is sharded."""
        fixed_by = "parallelism_config says otherwise" if self.torch_device_mesh is not None else ""
        fixed_by = "the loaders were prepared before" if self._dataloaders else fixed_by
        self._ranks_per_sample = parallelism.ranks_per_sample_with(
            model, self._ranks_per_sample, self._backend.place, fixed_by
        )

        together = models.DataParallelism(
            ddp=self._handlers.ddp,
            averages=not evaluation_mode,
            sharding=self._sharding,
            mesh=self._data_mesh,
            before_training_pass=self.gradient_state.refuse_missing_ranks,
            before_sharded_pass=self.gradient_state.refuse_missing_shards,
        )
        placed = self._is_placed(device_placement)

        def prepare_and_compile(model: torch.nn.Module) -> torch.nn.Module:
            prepared = models.prepare_model(
                model, self._data_backend, self._precision, together, device_placement=placed
            )
            return compiling.compile_prepared(prepared, self._dynamo)

        model = self._once(model, prepare_and_compile)
        if fsdp.is_sharded(model):
            for optimizer in self._optimizers:  # prepared before sharding replaced the model's parameters
                fsdp.remap(optimizer.optimizer)
        return model

    @property
    def _data_mesh(self) -> Any:
        config = self.parallelism_config
        return None if config is None or not config.dp_dim_names else self.torch_device_mesh[tuple(config.dp_dim_names)]

    def _prepare_leaf(self, leaf: torch.Tensor, device_placement: bool) -> torch.Tensor:
        if not models.is_leaf(leaf):
            return leaf
        return self._once(leaf, models.prepare_leaf, self._backend, device_placement=device_placement)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer. Its state moves to its parameters' device, unless ``device_placement=False``."""
        moves, mark_step = self._is_placed(device_placement), self._backend.mark_step
        prepare = functools.partial(optimizers.prepare_optimizer, moves=moves, mark_step=mark_step)
        return self._once(optimizer, prepare, self.gradient_state, self._precision.scaler)

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: object = None
    ) -> DataLoaderShard:
        """Prepare one loader. ``slice_fn_for_dispatch`` is refused, since rank 0 slices no batches."""
        data.refuse_slicing(slice_fn_for_dispatch)
        device = self.device if self._is_placed(device_placement) else None
        prepare = functools.partial(data.shard_dataloader, config=self.dataloader_config, rng_types=self._rng_types)
        return self._once(data_loader, prepare, backend=self._data_backend, device=device)

    def prepare_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Prepare one scheduler, whose optimizer is prepared already."""
        steps = 1 if self.dataloader_config.split_batches else self._data_backend.place.world_size
        follows = self._step_scheduler_with_optimizer

        def prepare(scheduler: LRScheduler) -> AcceleratedScheduler:
            if self.is_main_process and follows:
                unprepared_warnings.log_schedule_hint(scheduler, ranks=steps, window=self.gradient_accumulation_steps)
            return optimizers.prepare_scheduler(
                scheduler, self._optimizers, self.gradient_state, steps_per_call=steps, step_with_optimizer=follows
            )

        return self._once(scheduler, prepare)

    def _once(self, given: Any, prepare: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Return ``given`` as it was prepared before, or ``prepare(given, *args, **kwargs)``."""
        pairs = [(original(), prepared()) for original, prepared in self._pairs]
        found = next((pair[1] for pair in pairs if any(item is given for item in pair)), None)
        new: _T = prepare(given, *args, **kwargs) if found is None else found
        if found is None:
            self._pairs = [pair for pair in self._pairs if pair[1]() is not None]
            self._pairs.append((weakref.ref(given), weakref.ref(new)))
        kind, known = self._list_of(new)
        if not any(item is new for item in known):
            known.append(new)
            if not self._has_begun:
                self._await_training()
            if self._left.get(kind, 0) > 0:
                self._left[kind] -= 1
                unprepared_warnings.warn_of_late(kind)
        return new

    # Programs that were written for Accelerate change these lists too, to leave objects out of checkpoints.
    _models: list[torch.nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _schedulers: list[AcceleratedScheduler]
    _dataloaders: list[DataLoaderShard]
    _leaves: list[torch.Tensor]
    _pairs: list[tuple[weakref.ref[Any], weakref.ref[Any]]]  # originals, and what they have become

    def _forget_prepared(self) -> None:
        self._models, self._optimizers, self._schedulers, self._dataloaders = [], [], [], []
        self._leaves, self._pairs = [], []
        self._left: dict[str, int] = {}  # objects in the loaded checkpoint that weren't prepared then, by kind

    def _list_of(self, prepared: object) -> tuple[str, list[Any]]:
        """Return the kind of a prepared object, as in checkpoints, and the list of those."""
        lists: dict[type, tuple[str, list[Any]]] = {
            torch.nn.Module: ("model", self._models),
            AcceleratedOptimizer: ("optimizer", self._optimizers),
            AcceleratedScheduler: ("scheduler", self._schedulers),
            DataLoaderShard: ("loader", self._dataloaders),
        }
        return next((found for kind, found in lists.items() if isinstance(prepared, kind)), ("tensor", self._leaves))

    @property
    def _all_prepared(self) -> list[Any]:
        return [*self._models, *self._leaves, *self._optimizers, *self._dataloaders, *self._schedulers]

    def _is_placed(self, device_placement: bool | None) -> bool:
        return self._device_placement if device_placement is None else device_placement

    def _placements(self, objects: Sequence[object], device_placement: Sequence[bool | None] | None) -> list[bool]:
        """Return for each object whether it moves to the device."""
        asked: Any = [None] * len(objects) if device_placement is None else device_placement
        if not isinstance(asked, Sequence) or len(asked) != len(objects):
            raise ConfigError(
                f"prepare was given {len(objects)} objects and device_placement={device_placement!r}.",
                fix=f"a list of {len(objects)}: True, False or None for each object",
            )
        return [self._is_placed(placement) for placement in asked]

    def skip_first_batches(self, dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
        """Return a loader without the first ``num_batches`` batches, to resume in the middle of an epoch."""
        return skip_first_batches(dataloader, num_batches)

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """Return the model as it was before ``prepare``. The prepared model stays usable.

        Args:
            model: A prepared model; any other is returned as it is.
            keep_fp32_wrapper: Keep autocast. ``False`` returns a model with the same weights that computes in its own
                precision.
            keep_torch_compile: Return a model that was compiled before it was prepared as a compiled one.
        """
        return models.unwrap_model(model, keep_fp32_wrapper=keep_fp32_wrapper, keep_torch_compile=keep_torch_compile)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects and an unfinished accumulation window, and release unused device memory.

        Returns:
            One ``None`` per argument, to overwrite the caller's variables.
        """
        self._forget_prepared()
        self.gradient_state.reset()
        gc.collect()
        self._backend.release_memory()
        return [None] * len(objects)

    clear = free_memory

    def end_training(self) -> None:
        """Finish trackers, forget all prepared objects and leave the group, which is destroyed with its last member."""
        tracking.call([tracker for tracker in self.trackers if hasattr(tracker, "finish")], "finish")
        self.trackers = []
        self._wait_for_checkpoint()
        self.free_memory()
        self._backend.leave()

    # One step

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Call ``loss.backward(**kwargs)``, with the loss divided by the window's length and scaled for fp16.

        The length is ``gradient_accumulation_steps``, also in the shorter last window of an epoch, unless
        ``GradientAccumulationPlugin(scale_last_window=True)`` asks for the real one.

        Raises:
            CollectiveError: Another rank didn't take part in averaging. The message says where each rank was.
        """
        self._stopping.has_backward = True
        if not self._has_begun:
            self._begin_training()
        divided = self.gradient_state.divide(loss)
        scaled: Any = divided if self._precision.scaler is None else self._precision.scaler.scale(divided)
        if scaled is not loss:
            setattr(scaled, reporting.LOSS_ATTRIBUTE, loss)
        if self._save_on_end is not None:
            ACTIVE_ITERATIONS.before_next(self._save_if_at_end)
        ACTIVE_ITERATIONS.upload_next()
        end_pass = gradients.begin_backward() if gradients.REGISTERED else None
        try:
            scaled.backward(**kwargs)
            if end_pass is not None:
                end_pass()
        except RuntimeError as error:
            self._backend.explain(error)
            raise

    def _await_training(self) -> None:
        prepared_by = operator.attrgetter("_all_prepared")
        unprepared_warnings.await_training(self, prepared_by, Accelerator._begin_training)

    def _begin_training(self, stepped: torch.optim.Optimizer | None = None) -> None:
        self._has_begun = True
        unprepared_warnings.end_wait(self)
        if self.is_main_process:
            window = self.gradient_accumulation_steps if self.gradient_state.micro_batches else 1
            scales = self._precision.scaler is not None
            ranks = self._data_backend.place.world_size
            unprepared_warnings.warn(self._all_prepared, ranks=ranks, window=window, scales=scales, stepped=stepped)
            unprepared_warnings.warn_of_second_skip()
            checkpoint_folders.warn_if_taken(self.project_configuration)

    def accumulate(self, *models: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context for one micro-batch: its forward and backward pass and the optimizer's step.

        Each rank sums gradients locally until ``gradient_accumulation_steps`` micro-batches are done or the loader
        ends. Only then are they averaged over the ranks and do optimizers and schedulers step.
        """
        return self.gradient_state.accumulate(models, lambda: optimizers.parameters_of(self._optimizers))

    def no_sync(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the backward pass leaves ``model``'s gradients local to this rank."""
        return accumulation.no_sync(model)

    def trigger_sync_in_backward(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the backward pass averages gradients although the forward pass was in ``no_sync``.

        Raises:
            TrainingError: The model was prepared to find unused parameters, which only a forward pass finds.
        """
        return accumulation.sync_in_backward(model)

    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context in which ranks that run out of batches take part in the remaining ranks' collectives.

        Args:
            joinables: The prepared models that are trained in the context.
            even_batches: The setting of the prepared loaders within the context; by default their own.
        """
        if self.num_processes == 1:
            return contextlib.nullcontext()
        joinables = list(joinables)
        fsdp.refuse_sharded(joinables, "join_uneven_inputs", "even_batches=True, or DataLoader(..., drop_last=True)")
        even = self.dataloader_config.even_batches if even_batches is None else even_batches
        return join_uneven_inputs(joinables, even, loaders=self._dataloaders, state=self.gradient_state)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        """Return a context that computes in mixed precision, for code outside of a prepared model."""
        return self._precision.autocast(autocast_handler)

    def maybe_context_parallel(
        self,
        buffers: list[torch.Tensor] | None = None,  # noqa: ARG002  # Accelerate's signature
        buffer_seq_dims: list[int] | None = None,  # noqa: ARG002
        no_restore_buffers: set[torch.Tensor] | None = None,  # noqa: ARG002
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing, for programs that can divide sequences: ``cp_size`` is always 1 here."""
        return contextlib.nullcontext()

    def profile(self, profile_handler: ProfileKwargs | None = None) -> contextlib.AbstractContextManager[Any]:
        """Return a context that runs torch's profiler and yields it."""
        return handlers.profile(profile_handler or self._handlers.profile, self.process_index)

    def unscale_gradients(self, optimizer: AcceleratedOptimizer | Sequence[AcceleratedOptimizer] | None = None) -> None:
        """Unscale fp16 gradients if this micro-batch ends an accumulation window.

        Args:
            optimizer: One or several prepared optimizers; by default all.
        """
        if self.sync_gradients:
            chosen = self._optimizers if optimizer is None else optimizer
            optimizers.unscale(chosen if isinstance(chosen, Sequence) else [chosen], self._precision.scaler)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip gradients to a total norm, and return their norm before clipping.

        Safe to call in every micro-batch: before the end of a window it clips nothing and returns the norm so far.
        """
        return optimizers.clip_grad_norm(
            parameters, max_norm, norm_type, self._optimizers, self.gradient_state, self._precision.scaler
        )

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip gradients to ``[-clip_value, clip_value]`` at the end of a window; before that, do nothing."""
        optimizers.clip_grad_value(
            parameters, clip_value, self._optimizers, self.gradient_state, self._precision.scaler
        )

    # The time limit

    @property
    def should_stop(self) -> bool:
        """True once the time limit is near, from the same step on every rank.

        The limit comes from ``--end_at`` or the Slurm job, and this property is true from ``end_margin_s`` seconds
        before it. All ranks have to read the property equally often, such as once a step. When it is true, save the
        state and leave the loop. It isn't true where no checkpoint can be saved: within an accumulation window of a
        sharded model.
        """
        return checkpoint_saving.is_possible(self.gradient_state, self._models) and self._stopping.ask()

    def _save_if_at_end(self) -> None:
        if self.should_stop:
            folder = self.save_state(self._save_on_end or None)
            self.print(f"[its state is in {folder}: run it again to go on from there]")
            raise SystemExit

    # Collectives

    def gather(self, tensor: Any) -> Any:
        """Concatenate the ranks' tensors on every rank: ``(n, ...)`` becomes ``(num_processes * n, ...)``.

        The ranks of a tensor-parallel group work on the same samples, so they count as one here, in
        ``gather_for_metrics`` and in ``reduce``.

        The tensors can be nested in lists, tuples and mappings. With one process they are returned unchanged.
        With several the result has no gradients; ``torch.distributed.nn.functional.all_gather`` returns some that have.

        Raises:
            CollectiveError: Shapes or types differ between ranks. CPU ranks compare them before the collective.
        """
        return collectives.gather(self._data_backend, tensor, self.gradient_state.tail)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as ``gather`` does, but drop the samples that were repeated to fill the last batches of an epoch.

        Args:
            input_data: Nested tensors that have one row for each sample of the current batch, or an equal number of
                rows; or a list of objects.
            use_gather_object: Gather a list as objects even if its items are tensors.

        Raises:
            TrainingError: With ``even_batches=False`` some ranks have no batch in this round.
        """
        tail = self.gradient_state.tail
        if tail is None and self.is_main_process:
            unprepared_warnings.warn_of_late_gather(input_data)
        return collectives.gather_for_metrics(self._data_backend, input_data, tail, use_gather_object=use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce the ranks' tensors element by element into new tensors, multiplied by ``scale``.

        Args:
            tensor: Nested tensors.
            reduction: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``; ``"none"`` is another name for the sum.
            scale: The factor of the result.
        """
        return collectives.reduce(self._data_backend, tensor, reduction, scale)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Fill the ranks' tensors with those of one rank, in place, and return them."""
        return collectives.broadcast(self._backend, tensor, from_process)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad the ranks' tensors along ``dim`` to the greatest length, so that they can be gathered."""
        return collectives.pad_across_processes(self._data_backend, tensor, dim, pad_index, pad_first)

    # The project's folder

    def _open_project(
        self, folder: _Path | None, given: ProjectConfiguration | None, log_with: Any, save_on_end: _Path | bool
    ) -> None:
        self.project_configuration = given or ProjectConfiguration(project_dir=folder)
        if folder is not None and self.project_dir is None:
            self.project_configuration.set_directories(folder)
        self._log_with = tracking.resolve(log_with, self.logging_dir)
        self._save_on_end = stopping.check_folder(save_on_end, self.project_configuration)
        self._stopping = stopping.of_rank(self._backend, self, saves_on_end=self._save_on_end is not None)
        self._saving: checkpoint_saving.Saving | None = None
        self._registered: list[Any] = []
        self.before_save: list[Callable[[], None]] = []
        # Not plain dictionaries, which can't be referenced weakly as RemovableHandle does.
        self._save_hooks: collections.OrderedDict[int, Callable[..., None]] = collections.OrderedDict()
        self._load_hooks: collections.OrderedDict[int, Callable[..., None]] = collections.OrderedDict()

    @property
    def project_dir(self) -> _Path | None:
        """The run's folder."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> _Path | None:
        """The folder that trackers write to."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint, with automatic naming."""
        return self.project_configuration.iteration

    # Checkpoints

    def save_state(
        self, output_dir: _Path | None = None, safe_serialization: bool = True, *, async_: bool = False
    ) -> str:
        """Save everything that training depends on, so that ``load_state`` resumes it exactly.

        A checkpoint has the prepared models, optimizers and schedulers, the loss scaler, each rank's random states,
        the position of each loader, the gradients of an unfinished window, and registered objects. All ranks call this
        method. If only rank 0 does, it saves what it has, with a warning; that can't be done for sharded models. The
        folder appears when it is complete; if a process is killed before, the earlier checkpoint remains.

        Args:
            output_dir: The folder. With automatic naming it is ``project_dir/checkpoints/checkpoint_<iteration>``.
            safe_serialization: Write weights as safetensors rather than in torch's own format.
            async_: Return once everything is copied to host memory, and write it in the background. The next
                ``save_state`` or ``load_state``, ``end_training`` and the end of the rank wait for that.

        Returns:
            The folder.

        Raises:
            CheckpointError: A rank couldn't write its part, of this checkpoint or of an earlier one with ``async_``.
            ConfigError: There is no folder to save to, or the numbered one exists.
        """
        configuration = self.project_configuration
        is_numbered = configuration.automatic_checkpoint_naming
        if is_numbered and output_dir is not None and self.is_main_process:
            warnings.warn(
                f"save_state doesn't save to {output_dir}: automatic_checkpoint_naming=True numbers checkpoints, and "
                "total_limit deletes old ones. Fix: leave out either of them",
                stacklevel=2,
            )

        def choose() -> pathlib.Path:
            return checkpoint_folders.next_in(configuration) if is_numbered else _absolute(output_dir)

        def delete_oldest(folder: pathlib.Path) -> None:
            if is_numbered:
                checkpoint_folders.delete_oldest(folder.parent, configuration.total_limit)

        self._wait_for_checkpoint()
        backend = checkpoint_saving.savers(self._backend, self._models)
        if backend is None:  # rank 0 saves alone, and it alone knows the next number
            return "" if is_numbered else str(_absolute(output_dir))
        for function in self.before_save if backend is self._backend else ():
            function()
        self._saving = checkpoint_saving.save(
            backend,
            self._checkpoint_state(),
            [*self._save_hooks.values()],
            choose,
            safe=safe_serialization,
            in_background=async_,
            completed=delete_oldest,
        )
        configuration.count_on(self._saving.folder)
        return str(self._saving.folder)

    def _wait_for_checkpoint(self) -> None:
        if self._saving is not None:
            self._saving.wait()

    def load_state(
        self,
        input_dir: _Path | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        strict: bool = True,
        map_location: Literal["cpu", "on_device"] | None = None,  # noqa: ARG002  # Accelerate's signature
    ) -> str:
        """Restore training to the point at which ``save_state`` was called. All ranks call this after ``prepare``.

        Loaders resume the interrupted epoch, their ``epoch``, at its next batch. If the loop had received the last
        batch of that epoch, it gets no further one, and the code after the loop runs. A loop that is running during
        this call goes on with its own next batch; if it has none, the next loop resumes.

        The number of ranks may differ from the saved run's. Loaders then resume at the first sample that no saved rank
        had taken, and additional ranks draw fresh random numbers, with a warning.

        Of a checkpoint that Accelerate has saved, the weights of models are loaded, and nothing else, with a warning.

        Args:
            input_dir: The folder; with automatic naming the default is the checkpoint with the highest number.
            load_kwargs: ``{"weights_only": False}`` to also read registered objects that can run code when read.
            strict: Require that the models have exactly the tensors that were saved.
            map_location: It makes no difference: files are read to the CPU, and values go to where the objects are.

        Returns:
            The folder.

        Raises:
            CheckpointError: There is no such checkpoint, it isn't whole, or its model differs.
        """
        configuration = self.project_configuration
        is_numbered = input_dir is None and configuration.automatic_checkpoint_naming

        def choose() -> pathlib.Path:
            return checkpoint_folders.latest(configuration) if is_numbered else _absolute(input_dir)

        self._wait_for_checkpoint()
        hooks = [*self._load_hooks.values()]
        weights_only = bool((load_kwargs or {}).get("weights_only", True))
        options = {"strict": strict, "weights_only": weights_only}
        folder, self._left = checkpoint.load(self._backend, self._checkpoint_state(), hooks, choose, **options)
        random_state.agree(self._data_backend)
        configuration.count_on(folder)
        return str(folder)

    def _checkpoint_state(self) -> CheckpointState:
        states: dict[str, list[Any]] = {
            "optimizer": [*self._optimizers],
            "scheduler": [*self._schedulers],
            "scaler": [] if self._precision.scaler is None else [self._precision.scaler],
            checkpoint.CUSTOM: self._registered,
        }
        writes_whole = self._sharding is not None and self._sharding.saves_whole
        # A hook may change the list of models.
        return CheckpointState(
            [*self._models], states, self._dataloaders, self.gradient_state, self._leaves, writes_whole=writes_whole
        )

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Add objects to each checkpoint.

        Raises:
            TrainingError: An object has no ``state_dict`` or no ``load_state_dict``.
        """
        for item in objects:
            if not all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict")):
                raise TrainingError(
                    f"{type(item).__name__} can't be part of a checkpoint.",
                    why="It needs the methods state_dict() and load_state_dict(state).",
                    fix="give its class both",
                )
        self._registered += [item for item in objects if not any(item is known for known in self._registered)]

    def register_save_state_pre_hook(
        self, hook: Callable[[list[torch.nn.Module], list[dict[str, Any]], str], None]
    ) -> RemovableHandle:
        """Call ``hook(models, weights, folder)`` on every rank before models are saved.

        ``folder`` has a temporary name at that time. Weights that the hook removes from the list aren't saved. The
        returned handle's ``remove()`` removes the hook.
        """
        return _add_hook(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[[list[torch.nn.Module], str], None]) -> RemovableHandle:
        """Call ``hook(models, folder)`` on every rank before models are loaded.

        Models that the hook removes from the list aren't loaded. The returned handle's ``remove()`` removes the hook.
        """
        return _add_hook(self._load_hooks, hook)

    # Weights and other files

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the state dict of a model as it was before ``prepare``; with ``unwrap=False`` as it is now.

        For a sharded model all ranks have to call this: rank 0 gets the full tensors on the CPU, gathered one by one,
        and the other ranks get an empty dictionary.
        """
        if fsdp.is_sharded(model):
            collectives.verify_collective(self._backend, f"get_state_dict of a sharded {type(model).__name__}")
            return fsdp.whole_state(fsdp.state_of(model), self._backend)
        state: dict[str, Any] = self._backend.to_host(checkpoint.state_of(model) if unwrap else model.state_dict())
        return state

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: _Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights to ``model.safetensors`` on rank 0, in shards with an index if they are large.

        All ranks have to call this for a sharded model.

        Args:
            model: A model, prepared or not.
            save_directory: The folder.
            max_shard_size: A number of bytes, or text such as ``"5GB"``.
            safe_serialization: Write safetensors rather than torch's own format.

        Raises:
            CheckpointError: The model's state has a value that safetensors can't hold.
            ConfigError: ``max_shard_size`` isn't a size, or ``save_directory`` is a file.
        """
        state = self.get_state_dict(model) if fsdp.is_sharded(model) or self.is_main_process else {}
        if self.is_main_process:
            model_files.save_model(state, _absolute(save_directory), max_shard_size, safe_serialization)

    def save(self, obj: Any, f: _Path, safe_serialization: bool = False) -> None:
        """Write an object by ``torch.save`` on rank 0, or as safetensors. The file appears when it is complete."""
        if self.is_main_process:
            model_files.save(obj, f, safe=safe_serialization)

    # Trackers

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers of ``log_with`` on rank 0.

        Args:
            project_name: The run's name in the trackers.
            config: The run's settings, such as hyperparameters.
            init_kwargs: Further arguments by the tracker's name, such as ``{"wandb": {"mode": "offline"}}``.
        """
        if self.is_main_process:
            self.trackers = tracking.start(self._log_with, project_name, self.logging_dir, init_kwargs or {}, config)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Write values to every tracker on rank 0. A tracker that fails warns once, and training goes on."""
        for tracker in self.trackers:
            tracking.call([tracker], "log", dict(values), step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name, or with ``unwrap`` its library's own object.

        Ranks above 0 get a null object: its attributes, calls and items do nothing.

        Raises:
            ConfigError: There is no tracker of that name.
        """
        return tracking.find(self.trackers, name, unwrap=unwrap) if self.is_main_process else NotOnThisRank()


def _absolute(path: _Path | None) -> pathlib.Path:
    if path is None:
        raise ConfigError(
            "There is no folder for the checkpoint.",
            fix='give it one, or Accelerator(project_config=ProjectConfiguration(project_dir="runs/first", '
            "automatic_checkpoint_naming=True))",
        )
    return pathlib.Path(path).expanduser().resolve()


def _add_hook(hooks: collections.OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
