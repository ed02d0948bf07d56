"""How the ranks divide the work: replicas of a model, shards of a replica, and tensor parallelism.

The dimensions of torch's ``DeviceMesh`` are ``dp_replicate``, ``dp_shard`` and ``tp``, with Accelerate's names and in
this order. So the ranks of a tensor-parallel group have consecutive numbers, as do those of a replica.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from notebook_accel import environment
from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.payload.sharded_tensors import is_sharded_tensor
from notebook_accel.training import fsdp
from notebook_accel.training.fsdp_plugin import FullyShardedDataParallelPlugin

_PREFIX = "PARALLELISM_CONFIG_"
_NOT_HERE = {"cp": "context parallelism", "sp": "sequence parallelism"}


@dataclasses.dataclass
class ParallelismConfig:
    """Numbers of ranks for replicas of a model, shards of a replica (FSDP) and tensor parallelism.

    The product of the sizes is the number of ranks. A size that isn't given comes from the launch's variables, such as
    ``PARALLELISM_CONFIG_TP_SIZE``, and is 1 otherwise.

    Attributes:
        dp_replicate_size: Number of replicas of the model.
        dp_shard_size: Number of ranks over which each replica is sharded, by torch's ``fully_shard``.
        tp_size: Number of ranks that split each layer and work on the same samples. ``parallelize_module`` of
            ``torch.distributed.tensor.parallel`` splits the layers, with ``accelerator.torch_device_mesh["tp"]``.
        cp_size: Only 1: there is no context parallelism.
        cp_backend: A setting of context parallelism, which has no effect.
        sp_size: Only 1: there is no sequence parallelism over the data.
        sp_backend: A setting of sequence parallelism, which has no effect.
        tp_handler: Refused.
        cp_handler: Refused.
        sp_handler: Refused.

    Raises:
        ConfigError: A size isn't a number from 1, or a setting isn't supported.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: object = None
    cp_handler: object = None
    sp_handler: object = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_size"):
                given = os.environ.get(_PREFIX + field.name.upper(), "1") if value is None else value
                setattr(self, field.name, _size(field.name, given))
            elif field.name.endswith("_handler") and value is not None:
                raise ConfigError(f"ParallelismConfig({field.name}=...) isn't supported.", fix="leave it out")
        for kind, name in _NOT_HERE.items():
            if getattr(self, f"{kind}_size") != 1:
                raise ConfigError(
                    f"ParallelismConfig({kind}_size={getattr(self, f'{kind}_size')}): there is no {name} here.",
                    fix="tp_size or dp_shard_size; or Accelerate itself, which runs in ranks too",
                )
        if self.tp_enabled and self.dp_replicate_enabled and not self.dp_shard_enabled:
            raise ConfigError(
                "ParallelismConfig with dp_replicate_size and tp_size needs dp_shard_size too.",
                why="Gradients of parts of layers are averaged by fully_shard only.",
                fix=f"dp_shard_size={self.dp_replicate_size}, and dp_replicate_size=1",
            )

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions of the mesh with more than one rank, in order."""
        sizes = {name: getattr(self, f"{name}_size") for name in ("dp_replicate", "dp_shard", "tp")}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def dp_dim_names(self) -> list[str]:
        """The dimensions whose ranks work on different samples."""
        return [name for name in self.sizes if name != "tp"]

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The dimensions whose ranks work on the same samples."""
        return [name for name in self.sizes if name == "tp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All dimensions of the mesh, first those with samples of their own, then the others."""
        return self.dp_dim_names + self.non_dp_dim_names

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The dimensions over which a loss is averaged. They equal ``dp_dim_names``, without context parallelism."""
        return self.dp_dim_names

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The dimensions over which a copy of a model is sharded."""
        return [name for name in self.sizes if name == "dp_shard"]

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The dimensions of the mesh that ``fully_shard`` takes, by the names that Accelerate gives them."""
        return ["dp_shard_cp" if name == "dp_shard" else name for name in self.dp_dim_names]

    @property
    def joint_dimensions(self) -> dict[str, tuple[str, ...]]:
        """Further names in the mesh, Accelerate's, each with the dimensions that it joins to one."""
        joint = {"dp": self.dp_dim_names, "dp_cp": self.dp_cp_dim_names, "dp_shard_cp": self.dp_shard_cp_dim_names}
        return {name: tuple(dimensions) for name, dimensions in joint.items() if dimensions}

    @property
    def total_size(self) -> int:
        """The number of ranks."""
        return self.data_parallel_size * self.non_data_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """The number of batches that all ranks together work on at the same time."""
        return int(self.dp_replicate_size or 1) * int(self.dp_shard_size or 1)

    @property
    def non_data_parallel_size(self) -> int:
        """The number of ranks that work on the same batch."""
        return int(self.tp_size or 1)

    @property
    def copies(self) -> int:
        """The number of replicas of a model."""
        return int(self.dp_replicate_size or 1)

    @property
    def dp_replicate_enabled(self) -> bool:
        """True if there are several replicas of a model."""
        return self.dp_replicate_size != 1

    @property
    def dp_shard_enabled(self) -> bool:
        """True if models are sharded."""
        return self.dp_shard_size != 1

    @property
    def tp_enabled(self) -> bool:
        """True if models are tensor-parallel."""
        return self.tp_size != 1

    cp_enabled = sp_enabled = False


def _size(name: str, given: Any) -> int:
    if isinstance(given, bool) or not str(given).isdecimal() or int(given) < 1:
        raise ConfigError(f"{name} is {given!r}.", fix="a number of ranks, from 1")
    return int(given)


def resolve(
    given: ParallelismConfig | None, plugin: FullyShardedDataParallelPlugin | None, place: RankPlace
) -> ParallelismConfig | None:
    """Return how the ranks of this program divide the work; ``None`` for plain data parallelism.

    Raises:
        ConfigError: The sizes don't fit the number of ranks, or the plugin.
    """
    if given is not None and not isinstance(given, ParallelismConfig):
        raise ConfigError(f"parallelism_config is {given!r}.", fix="ParallelismConfig(tp_size=2)")
    if given is None and environment.flag(environment.USE_PARALLELISM):
        given = ParallelismConfig()
    if given is None and plugin is not None and plugin.replicates:
        given = _hybrid(place)
    if given is None:
        return None
    if given.total_size == 1:  # each rank has samples of its own, as without a configuration, and there is no mesh
        return dataclasses.replace(given)
    if given.total_size != place.world_size:
        shown = " x ".join(f"{name}_size={size}" for name, size in given.sizes.items())
        raise ConfigError(
            f"parallelism_config is for {given.total_size} ranks ({shown}), and there are {place.world_size}.",
            fix=f"num_processes={given.total_size}, or sizes whose product is {place.world_size}",
        )
    if plugin is not None and not given.dp_shard_enabled:
        raise ConfigError(
            "fsdp_plugin shards models, and parallelism_config leaves no ranks for that: dp_shard_size is 1.",
            fix="a larger dp_shard_size; or leave out fsdp_plugin, and --fsdp of the launch",
        )
    return dataclasses.replace(given)


def _hybrid(place: RankPlace) -> ParallelismConfig | None:
    """Return the division of ``HYBRID_SHARD``: a replica of the model on each node, sharded over its ranks."""
    nodes, left_over = divmod(place.world_size, place.local_world_size)
    if left_over:
        raise ConfigError(
            f"HYBRID_SHARD needs as many ranks on each node, and {place.world_size} ranks aren't "
            f"{place.local_world_size} a node.",
            fix="parallelism_config=ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)",
        )
    if nodes == 1 or place.local_world_size == 1:
        return None
    return ParallelismConfig(dp_replicate_size=nodes, dp_shard_size=place.local_world_size)


def ranks_per_sample_with(model: torch.nn.Module, so_far: int, place: RankPlace, fixed_by: str) -> int:
    """Return how many ranks work on the same samples after a model, which may be tensor-parallel, is prepared.

    ``so_far`` is the number before, and ``fixed_by`` the reason why it can't change, such as that loaders follow it;
    ``""`` if it can.

    Raises:
        TrainingError: The model is split over another number of ranks, and that number can't change.
    """
    found = ranks_per_sample_of(model, place)
    if found in (None, so_far):
        return so_far
    if fixed_by:
        raise TrainingError(
            f"{type(model).__name__} has parts on {found} ranks, which work on the same samples, and {fixed_by}.",
            fix=f"Accelerator(parallelism_config=ParallelismConfig(tp_size={found})), whose "
            'accelerator.torch_device_mesh["tp"] parallelize_module takes',
        )
    return int(found or so_far)


def ranks_per_sample_of(model: torch.nn.Module, place: RankPlace) -> int | None:
    """Return how many ranks work on the same samples because of a model's ``DTensor``s; ``None`` if it has none.

    Raises:
        TrainingError: Tensor-parallel ranks aren't neighbours, or nothing averages the gradients of several replicas.
    """
    sharded: Any = filter(is_sharded_tensor, model.parameters())
    meshes = {parameter.device_mesh for parameter in sharded}
    if not meshes:
        return None
    data_mesh = fsdp.data_mesh(model)
    if data_mesh is not None:
        size = place.world_size // data_mesh.size()
        expected = range(place.rank % size, place.world_size, size)
        found = data_mesh.mesh.flatten().tolist()
    else:
        size = max(mesh.size() for mesh in meshes)
        first = place.rank - place.rank % size
        expected = range(first, first + size)
        found = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    if sorted(found) != [*expected]:
        raise TrainingError(
            f"prepare can't take {type(model).__name__}: its parts, or its shares, are on the ranks "
            f"{', '.join(map(str, found))}.",
            why="Ranks that work on the same samples have to be neighbours: tensor parallelism is a mesh's last "
            "dimension, and with the one of fully_shard it has all ranks.",
            fix='init_device_mesh(device, (shares, parts), mesh_dim_names=("dp", "tp"))',
        )
    return int(size)
