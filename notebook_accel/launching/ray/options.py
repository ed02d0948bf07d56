"""The options of a launch on a Ray cluster: ``engine_options``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import yaml

from notebook_accel.errors import ConfigError

_NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class RayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options for the place of the ranks.

    Attributes:
        address: The cluster: ``auto`` for the one that this machine belongs to or ``RAY_ADDRESS`` names, ``host:port``,
            or ``ray://host:port``. Of no effect if the notebook is connected to a cluster already.
        cpus_per_rank: CPUs to reserve for each rank. Default: one for a rank without a GPU.
        gpus_per_rank: GPUs to reserve for each rank. Default: one if the cluster has any.
        resources: Other resources to reserve for each rank, by Ray's names.
        strategy: The spread of the ranks over nodes, as Ray's placement groups have it.
        nodes: Number of nodes that the ranks have to be on; ``None`` for any.
        runtime_env: Ray's runtime environment for the nodes: variables, pip packages, a working directory's URI.
        wait_s: Longest wait for resources that are in use, in seconds.
    """

    address: str = "auto"
    cpus_per_rank: _NotNegative | None = None
    gpus_per_rank: _NotNegative | None = None
    resources: dict[str, float] = {}
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    nodes: Annotated[int, msgspec.Meta(ge=1)] | None = None
    runtime_env: dict[str, Any] = {}
    wait_s: Annotated[float, msgspec.Meta(gt=0)] = 300.0


def read(pairs: Sequence[str]) -> RayOptions:
    """Return the options from texts such as ``strategy=SPREAD``, whose values are YAML.

    Raises:
        ConfigError: An option doesn't exist, or can't have its value.
    """
    given: dict[str, Any] = {}
    known = RayOptions.__struct_fields__
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if name not in known or not equals:
            raise ConfigError(
                f"The engine option {pair!r} is not known.", fix=f"NAME=VALUE, where NAME is one of {', '.join(known)}"
            )
        try:
            given[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            given[name] = text
    try:
        return msgspec.convert(given, RayOptions)
    except msgspec.ValidationError as error:
        what, _, where = str(error).rpartition(" - at `$.")
        name = where.rstrip("`").partition("[")[0]
        raise ConfigError(f"The engine option {name}={given.get(name)!r} can't be used.", why=f"{what}.") from None
