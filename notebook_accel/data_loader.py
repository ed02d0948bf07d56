"""The names that users of Accelerate import from ``accelerate.data_loader``."""

from notebook_accel.training.data import prepare_data_loader
from notebook_accel.training.dispatching import DataLoaderDispatcher
from notebook_accel.training.loaders import DataLoaderShard
from notebook_accel.training.samplers import SeedableRandomSampler, SkipBatchSampler
from notebook_accel.training.sharding import BatchSamplerShard, IterableDatasetShard
from notebook_accel.training.skipping import skip_first_batches

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
