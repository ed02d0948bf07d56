"""``accelerator.profile()``: torch's profiler around a part of training, one trace a rank."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from notebook_accel.errors import ConfigError

__all__ = ["ProfileKwargs", "profile"]

_ACTIVITIES = {
    "cpu": torch.profiler.ProfilerActivity.CPU,
    "cuda": torch.profiler.ProfilerActivity.CUDA,
    "xpu": torch.profiler.ProfilerActivity.XPU,
}


@dataclasses.dataclass(frozen=True)
class ProfileKwargs:
    """How to profile; ``torch.profiler.profile`` has the details.

    Attributes:
        activities: Some of ``"cpu"``, ``"cuda"`` and ``"xpu"``; by default all that there are.
        schedule_option: Arguments of ``torch.profiler.schedule``, such as ``{"wait": 1, "warmup": 1, "active": 3}``.
        on_trace_ready: Called with the profiler when a trace is complete.
        record_shapes: Record the shapes of inputs.
        profile_memory: Record what is allocated and freed.
        with_stack: Record where in the source operations are called.
        with_flops: Estimate floating point operations of some operations.
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
        """The profiler."""
        options: dict[str, Any] = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("activities", "schedule_option", "output_trace_dir")
        }
        return torch.profiler.profile(
            activities=None if self.activities is None else [_ACTIVITIES[name] for name in self.activities],
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            **options,
        )


@contextlib.contextmanager
def profile(options: ProfileKwargs | None, rank: int) -> Iterator[torch.profiler.profile]:
    """Profiles the body on this rank, and writes its trace where ``options`` says."""
    options = options or ProfileKwargs()
    with options.build() as profiler:
        yield profiler
    if options.output_trace_dir is not None:
        folder = pathlib.Path(options.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{rank}.json"))
