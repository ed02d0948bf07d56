"""What a launch on a cluster can be told besides: ``engine_options``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import yaml

from notebook_accel.errors import ConfigError

__all__ = ["RayOptions", "read"]

_NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class RayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where ranks run.

    Attributes:
        address: The cluster: ``auto`` for the one that this machine belongs to or ``RAY_ADDRESS`` names, ``host:port``,
            or ``ray://host:port``. A cluster that the notebook is connected to already is used as it is.
        cpus_per_rank: CPUs that are reserved for each rank. Default: one where no GPU is.
        gpus_per_rank: GPUs that are reserved for each rank. Default: one where the cluster has any.
        resources: What else is reserved for each rank, by Ray's names.
        strategy: How ranks are spread over nodes, as Ray's placement groups have it.
        nodes: On how many nodes the ranks have to be; ``None``: on any number.
        runtime_env: Ray's runtime environment for the nodes: variables, pip packages, a working directory's URI.
        wait_s: How long to wait for what the cluster doesn't have free, in seconds.
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
    """The options, from texts such as ``strategy=SPREAD``, whose values are YAML.

    Raises:
        ConfigError: There is no such option, or it can't have that value.
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
