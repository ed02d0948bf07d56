"""What ``Accelerator(kwargs_handlers=[...])`` takes: settings that are handed on to torch, under Accelerate's names."""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections.abc import Iterable
from typing import Any

from notebook_accel.errors import ConfigError
from notebook_accel.training.profiling import ProfileKwargs

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DistributedDataParallelKwargs",
    "GradScalerKwargs",
    "Handlers",
    "InitProcessGroupKwargs",
]


class DDPCommunicationHookType(enum.Enum):
    """How gradients travel between ranks; see torch's page on DDP communication hooks."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclasses.dataclass(frozen=True)
class AutocastKwargs:
    """How the forward pass is autocast; ``torch.autocast`` has the details.

    Attributes:
        enabled: ``False`` computes in float32 in spite of ``mixed_precision``.
        cache_enabled: Cast each weight once for a forward pass; ``None`` is torch's default.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclasses.dataclass(frozen=True)
class GradScalerKwargs:
    """How losses are scaled with fp16; ``torch.amp.GradScaler`` has the details.

    Attributes:
        init_scale: The first scale.
        growth_factor: What the scale is multiplied by after ``growth_interval`` steps without an overflow.
        backoff_factor: What it is multiplied by after an overflow.
        growth_interval: In steps.
        enabled: ``False`` leaves losses as they are.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclasses.dataclass(frozen=True)
class InitProcessGroupKwargs:
    """How ranks come together and how long they wait for each other.

    Attributes:
        backend: ``"nccl"`` or ``"gloo"``; by default what suits the device. With ``"gloo"`` several ranks can share a
            GPU.
        init_method: Only ``None`` and ``"env://"``: ranks meet where their environment says.
        timeout: How long a rank waits for the others, when it joins and in each collective. By default 10 minutes for
            joining and for collectives of GPUs, 30 for collectives of CPUs, which are torch's.

    Raises:
        ConfigError: One of them can't be.
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


@dataclasses.dataclass(frozen=True)
class DistributedDataParallelKwargs:
    """How gradients are averaged; ``torch.nn.parallel.DistributedDataParallel`` has the details.

    Attributes:
        dim: Of torch; without effect there with one device a rank.
        broadcast_buffers: Give all ranks rank 0's buffers before each forward pass.
        bucket_cap_mb: Size of the buckets in which gradients travel, in MiB.
        find_unused_parameters: Cope with parameters that a forward pass doesn't use.
        check_reduction: Of torch; without effect there.
        gradient_as_bucket_view: Save memory by having gradients lie in the buckets.
        static_graph: Every forward pass uses the same parameters.
        comm_hook: How gradients travel.
        comm_wrapper: ``FP16`` or ``BF16`` around a PowerSGD hook.
        comm_state_option: For PowerSGD: the arguments of torch's ``PowerSGDState``.

    Raises:
        ConfigError: ``comm_wrapper`` is something else.
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
        """The arguments of ``DistributedDataParallel`` that differ from its defaults; torch warns of some of them."""
        ours = ("comm_hook", "comm_wrapper", "comm_state_option", "check_reduction")
        told = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: value for name, (value, default) in told.items() if name not in ours and value != default}


@dataclasses.dataclass(frozen=True)
class Handlers:
    """One of each kind."""

    autocast: AutocastKwargs = AutocastKwargs()
    ddp: DistributedDataParallelKwargs = DistributedDataParallelKwargs()
    group: InitProcessGroupKwargs = InitProcessGroupKwargs()
    profile: ProfileKwargs = dataclasses.field(default=ProfileKwargs())
    scaler: GradScalerKwargs = GradScalerKwargs()

    @classmethod
    def of(cls, given: Iterable[object] | None) -> Handlers:
        """Sorts what ``kwargs_handlers`` was given.

        Raises:
            ConfigError: There are two of a kind, or one of no known kind.
        """
        kinds = {type(field.default): field.name for field in dataclasses.fields(cls)}
        known = ", ".join(kind.__name__ for kind in kinds)
        found: dict[str, Any] = {}
        for handler in given or ():
            name = kinds.get(type(handler))
            if name is None:
                raise ConfigError(f"kwargs_handlers has a {type(handler).__name__}.", fix=f"one of {known}")
            if name in found:
                raise ConfigError(f"kwargs_handlers has two {type(handler).__name__}.", fix="put both into one")
            found[name] = handler
        return cls(**found)
