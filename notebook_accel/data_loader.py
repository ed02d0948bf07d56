"""The names that users of Accelerate import from ``accelerate.data_loader``."""

from notebook_accel.training.data import prepare_data_loader
from notebook_accel.training.loaders import DataLoaderDispatcher, DataLoaderShard, skip_first_batches
from notebook_accel.training.sharding import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)

__all__ = [
    "BatchSamplerShard",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "prepare_data_loader",
    "skip_first_batches",
]
