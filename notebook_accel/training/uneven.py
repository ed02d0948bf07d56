"""Training with more batches on some ranks than on others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch.distributed.algorithms.join import Join, Joinable

from notebook_accel.errors import ConfigError
from notebook_accel.training.accumulation import GradientState
from notebook_accel.training.loaders import DataLoaderShard

__all__ = ["join_uneven_inputs"]


@contextlib.contextmanager
def join_uneven_inputs(
    joinables: Iterable[Any], even_batches: bool, *, loaders: Iterable[DataLoaderShard], state: GradientState
) -> Iterator[None]:
    """Let ranks that have no further batch take part in the collectives of the others, until none has one.

    torch's ``Join`` does it: gradients of those ranks count as zeros, and in the end all have the model of a rank that
    took every step. Optimizer state, such as momentum, isn't brought together.

    Args:
        joinables: Prepared models, or other objects that torch can join.
        even_batches: Overrides the option of ``loaders`` in the body.
        loaders: The prepared loaders.
        state: Gets ``joins_uneven`` in the body, so that missing batches are no error.

    Raises:
        ConfigError: Something can't be joined, or a loader can't be changed now.
    """
    joinables = list(joinables)
    for joinable in joinables:
        if not isinstance(joinable, Joinable):
            raise ConfigError(
                f"join_uneven_inputs takes prepared models, not {type(joinable).__name__}.",
                why="Its parameters don't learn, or prepare hasn't been called: no gradients are averaged.",
                fix="join_uneven_inputs([accelerator.prepare(model)])",
            )
    join = Join(joinables, enable=not even_batches, throw_on_early_termination=False)
    with _with_batches(loaders, even_batches), _without_refusal(state), join:
        yield


@contextlib.contextmanager
def _with_batches(loaders: Iterable[DataLoaderShard], even: bool) -> Iterator[None]:
    changed = [loader for loader in loaders if loader.shard is not None and loader.shard.even_batches != even]
    for loader in changed:
        if loader.persistent_workers and loader.batch_sampler is None:
            raise ConfigError(
                "even_batches can't be changed for a stream that is read by workers which outlive an epoch.",
                fix="DataLoader(..., persistent_workers=False), or DataLoaderConfiguration(even_batches=...)",
            )
    shards = [loader.shard for loader in changed if loader.shard is not None]
    for shard in shards:
        shard.even_batches = even
    try:
        yield
    finally:
        for shard in shards:
            shard.even_batches = not even


@contextlib.contextmanager
def _without_refusal(state: GradientState) -> Iterator[None]:
    before, state.joins_uneven = state.joins_uneven, True
    try:
        yield
    finally:
        state.joins_uneven = before
