"""The engine for runs on several nodes, by torch elastic in a separate process.

The kernel imports nothing of torch elastic, which would install signal handlers and never remove them. The ranks are
the same as those of a run on one machine.
"""

from __future__ import annotations

from notebook_accel import environment
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError
from notebook_accel.launching.kernel import local
from notebook_accel.launching.kernel.job import Job, LaunchRequest
from notebook_accel.protocol.agent_messages import ElasticOptions, Meeting

PORT = 29500  # the default of torchrun and Accelerate
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TIMEOUT_S = 600.0  # torch elastic's default
_LONGEST_S = 1e8  # three years, which torch can count in milliseconds
_KEEP_ALIVE = {"keep_alive_interval": 5.0, "keep_alive_max_attempt": 3.0}  # seconds, count; torch elastic's defaults
_STATIC = ("timeout", *_KEEP_ALIVE)
_C10D = ("join_timeout", "close_timeout", "heartbeat_timeout", "read_timeout", "is_host")


def is_wanted(config: LaunchConfig) -> bool:
    """Return whether a launch is a part of a run on several nodes."""
    return config.num_nodes > 1


def check(config: LaunchConfig) -> None:
    """Check the options about nodes, even for a launch on one node.

    Raises:
        ConfigError: The options don't fit together.
    """
    if is_wanted(config):
        _meeting(config)
        return
    _settings(config)
    for name, is_unused in (
        ("node_rank", config.node_rank == 0),
        ("master_addr", config.master_addr in _LOOPBACK),
        # torchrun's documentation uses c10d with an endpoint for one node too. Nothing else connects to it.
        ("rdzv_endpoint", not config.rdzv_endpoint or config.rdzv_backend == "c10d"),
    ):
        if not is_unused:
            raise ConfigError(
                f"{name}={getattr(config, name)!r} is about several nodes, and num_nodes is 1.",
                fix=f"num_nodes=2 (or more), or leave out {name}",
            )
    _endpoint(config, lowest_port=0)  # torchrun's localhost:0 means any port


def launch(request: LaunchRequest) -> Job:
    """Start this node's ranks of a run on several nodes, by an elastic process that orders their start."""
    config = request.config
    options = ElasticOptions(
        max_restarts=config.max_restarts,
        monitor_interval_s=config.monitor_interval,
        run_id=config.rdzv_id,
        meeting=_meeting(config),
        training=environment.training_options(request.spec.environment),
    )
    return local.engine().launch(request, options)


def _meeting(config: LaunchConfig) -> Meeting:
    settings = _settings(config)
    if config.rdzv_backend == "static" and config.node_rank >= config.num_nodes:
        raise ConfigError(
            f"node_rank={config.node_rank} is too high for num_nodes={config.num_nodes}.",
            fix=f"node_rank=0 to {config.num_nodes - 1}, another one on each node",
        )
    host, port = _endpoint(config)
    keep_alive = {name: float(settings.pop(name, default)) for name, default in _KEEP_ALIVE.items()}
    timeout_s = float(settings.pop("timeout", settings.get("join_timeout", _TIMEOUT_S)))
    if config.rdzv_backend != "static":
        settings["join_timeout"] = f"{timeout_s:.0f}"
        settings |= {name: f"{max(value, 1):.0f}" for name, value in keep_alive.items()}
    return Meeting(
        num_nodes=config.num_nodes,
        node_rank=config.node_rank,
        backend=config.rdzv_backend,
        host=host,
        port=port,
        timeout_s=timeout_s,
        silence_s=keep_alive["keep_alive_interval"] * keep_alive["keep_alive_max_attempt"],
        settings=settings,
    )


def _endpoint(config: LaunchConfig, lowest_port: int = 1) -> tuple[str, int]:
    """Return the host and port of the rendezvous. Brackets around an IPv6 address are left out."""
    given = config.rdzv_endpoint
    if not given:
        return config.master_addr, _default_port(config)
    host, _, port = given.rpartition(":")
    if not host or (":" in host and not host.endswith("]")):  # a name, or an IPv6 address such as ::1, without a port
        return given.strip("[]"), _default_port(config)
    if not port.isdigit() or not lowest_port <= int(port) < 1 << 16:
        raise ConfigError(
            f"rdzv_endpoint={given!r} has no port{' where other nodes could find this one' if port == '0' else ''}.",
            fix="rdzv_endpoint='10.0.0.1:29500', or '[fd00::1]:29500'",
        )
    return host.strip("[]"), int(port)


def _default_port(config: LaunchConfig) -> int:
    if config.main_process_port == 0 and is_wanted(config):
        raise ConfigError(
            "main_process_port=0 means any free port, and several nodes have to know it.",
            fix=f"the same number on all nodes; without main_process_port (use_port) it is {PORT}",
        )
    return config.main_process_port or PORT


def _settings(config: LaunchConfig) -> dict[str, str]:
    known = _STATIC if config.rdzv_backend == "static" else (*_STATIC, *_C10D)
    settings: dict[str, str] = {}
    for part in config.rdzv_conf:
        name, equals, value = part.partition("=")
        if name not in known or not equals:
            raise ConfigError(
                f"rdzv_conf has {part!r}, which {config.rdzv_backend} doesn't know.",
                fix=f"name=value, with one of {', '.join(known)}",
            )
        if name != "is_host" and not _is_duration(value):
            raise ConfigError(
                f"rdzv_conf has {part!r}, which isn't a number above 0 and up to {_LONGEST_S:.0e}.",
                fix=f"{name}=60, in seconds",
            )
        settings[name] = value
    return settings


def _is_duration(text: str) -> bool:
    try:
        return 0 < float(text) <= _LONGEST_S
    except ValueError:
        return False
