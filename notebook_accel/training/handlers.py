"""Settings that ``Accelerator(kwargs_handlers=[...])`` passes on to torch, under Accelerate's names.

They can be changed until an Accelerator is created, which copies and checks them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import enum
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from notebook_accel.errors import ConfigError

_ACTIVITIES = {
    "cpu": torch.profiler.ProfilerActivity.CPU,
    "cuda": torch.profiler.ProfilerActivity.CUDA,
    "xpu": torch.profiler.ProfilerActivity.XPU,
}


class DDPCommunicationHookType(enum.Enum):
    """Ways to compress gradients between ranks; see torch's page on DDP communication hooks."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclasses.dataclass
class KwargsHandler:
    """The base class of settings that are passed on as arguments."""

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of all settings by name."""
        return copy.deepcopy(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, by name."""
        defaults = vars(type(self)())
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}


@dataclasses.dataclass
class AutocastKwargs(KwargsHandler):
    """Settings of autocast in the forward pass; ``torch.autocast`` has the details.

    Attributes:
        enabled: ``False`` computes in float32 in spite of ``mixed_precision``.
        cache_enabled: Cast each weight once per forward pass; ``None`` is torch's default.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclasses.dataclass
class GradScalerKwargs(KwargsHandler):
    """Settings of loss scaling in fp16; ``torch.amp.GradScaler`` has the details.

    Attributes:
        init_scale: The first scale.
        growth_factor: The scale's factor after ``growth_interval`` steps without an overflow.
        backoff_factor: The scale's factor after an overflow.
        growth_interval: Number of steps without an overflow before the scale grows.
        enabled: ``False`` leaves losses as they are.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclasses.dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Settings of the process group: its backend and its timeout.

    Attributes:
        backend: ``"nccl"`` or ``"gloo"``; by default the one for the device. With ``"gloo"`` several ranks can share a
            GPU.
        init_method: Only ``None`` or ``"env://"``: the environment variables give the address.
        timeout: The longest time that a rank waits for the others when it joins and in each collective. The defaults
            are torch's: 10 minutes for joining and for collectives of GPUs, 30 minutes for collectives of CPUs.

    Raises:
        ConfigError: An option has an invalid value.
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: datetime.timedelta | None = None

    def __post_init__(self) -> None:
        if self.backend not in (None, "nccl", "gloo"):
            raise ConfigError(
                f"InitProcessGroupKwargs(backend={self.backend!r}).", fix='"nccl", "gloo", or leave it out'
            )
        if self.init_method not in (None, "env://"):
            raise ConfigError(
                f"InitProcessGroupKwargs(init_method={self.init_method!r}).",
                why="Ranks meet at MASTER_ADDR:MASTER_PORT, which the launcher sets.",
                fix="leave init_method out",
            )
        if self.timeout is not None and self.timeout <= datetime.timedelta():
            raise ConfigError(f"InitProcessGroupKwargs(timeout={self.timeout!r}).", fix="timedelta(minutes=30)")


@dataclasses.dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Settings of gradient averaging; ``torch.nn.parallel.DistributedDataParallel`` has the details.

    Attributes:
        dim: An option of torch that has no effect, since each rank has one device.
        broadcast_buffers: Give all ranks rank 0's buffers before each forward pass.
        bucket_cap_mb: Size of the buckets in which gradients are all-reduced, in MiB.
        find_unused_parameters: Allow forward passes that don't use all parameters.
        check_reduction: An option of torch that has no effect.
        gradient_as_bucket_view: Keep gradients in the buckets, which saves memory.
        static_graph: Assume that every forward pass uses the same parameters.
        comm_hook: Compression of the gradients that ranks exchange.
        comm_wrapper: ``FP16`` or ``BF16`` around a PowerSGD hook.
        comm_state_option: The arguments of torch's ``PowerSGDState``, for PowerSGD.

    Raises:
        ConfigError: ``comm_wrapper`` has another value.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = DDPCommunicationHookType
        if self.comm_wrapper not in (kinds.NO, kinds.FP16, kinds.BF16):
            raise ConfigError(f"comm_wrapper is {self.comm_wrapper}.", fix="DDPCommunicationHookType.FP16, BF16 or NO")

    def options(self) -> dict[str, Any]:
        """Return the arguments of ``DistributedDataParallel`` that differ from its defaults: it warns about some."""
        ours = ("comm_hook", "comm_wrapper", "comm_state_option", "check_reduction")
        return {name: value for name, value in self.to_kwargs().items() if name not in ours}


@dataclasses.dataclass
class ProfileKwargs(KwargsHandler):
    """Settings of torch's profiler; ``torch.profiler.profile`` has the details.

    Attributes:
        activities: Some of ``"cpu"``, ``"cuda"`` and ``"xpu"``; by default all that are available.
        schedule_option: Arguments of ``torch.profiler.schedule``, such as ``{"wait": 1, "warmup": 1, "active": 3}``.
        on_trace_ready: Called with the profiler when a trace is complete.
        record_shapes: Record the shapes of inputs.
        profile_memory: Record allocations.
        with_stack: Record the source lines that call operations.
        with_flops: Estimate the floating point operations of some operations.
        with_modules: Record the modules that operations are called from.
        output_trace_dir: A folder for Chrome traces, ``profile_<rank>.json``.

    Raises:
        ConfigError: There is no such activity.
    """

    activities: Sequence[str] | None = None
    schedule_option: Mapping[str, int] | None = None
    on_trace_ready: Callable[[Any], None] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        for name in self.activities or ():
            if name not in _ACTIVITIES:
                raise ConfigError(f"activities has {name!r}.", fix=f"some of {', '.join(map(repr, _ACTIVITIES))}")

    def build(self) -> torch.profiler.profile:
        """Return a profiler with these settings."""
        return torch.profiler.profile(
            activities=None if self.activities is None else [_ACTIVITIES[name] for name in self.activities],
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@contextlib.contextmanager
def profile(options: ProfileKwargs, rank: int) -> Iterator[torch.profiler.profile]:
    """Profile the body on this rank, and write its trace to ``options.output_trace_dir``."""
    with options.build() as profiler:
        yield profiler
    if options.output_trace_dir is not None:
        folder = pathlib.Path(options.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{rank}.json"))


@dataclasses.dataclass(frozen=True)
class Handlers:
    """One handler of each kind."""

    autocast: AutocastKwargs = dataclasses.field(default_factory=AutocastKwargs)
    ddp: DistributedDataParallelKwargs = dataclasses.field(default_factory=DistributedDataParallelKwargs)
    group: InitProcessGroupKwargs = dataclasses.field(default_factory=InitProcessGroupKwargs)
    profile: ProfileKwargs = dataclasses.field(default_factory=ProfileKwargs)
    scaler: GradScalerKwargs = dataclasses.field(default_factory=GradScalerKwargs)

    @classmethod
    def from_list(cls, given: Iterable[object] | None) -> Handlers:
        """Sort copies of the handlers in ``kwargs_handlers`` by kind.

        Raises:
            ConfigError: Two handlers are of one kind, one is of no known kind, or one has an invalid value.
        """
        kinds: dict[Any, str] = {field.default_factory: field.name for field in dataclasses.fields(cls)}
        found: dict[str, Any] = {}
        handler: Any
        for handler in given or ():
            name = kinds.get(type(handler))
            if name is None:
                known = ", ".join(kind.__name__ for kind in kinds)
                raise ConfigError(f"kwargs_handlers has a {type(handler).__name__}.", fix=f"one of {known}")
            if name in found:
                raise ConfigError(f"kwargs_handlers has two {type(handler).__name__}.", fix="put both into one")
            found[name] = dataclasses.replace(handler)  # a copy, which is checked again
        return cls(**found)
