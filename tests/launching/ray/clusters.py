"""Real Ray clusters whose nodes are all on this machine, which may be busy."""

from __future__ import annotations

import contextlib
import importlib
import socket
import time
import unittest.mock
from collections.abc import Iterator
from typing import Any

_PATIENCE_S = 120
# Nobody looks at a dashboard here, needs an autoscaler, or what copies the workers' output.
_NODE = {"include_dashboard": False, "include_log_monitor": False}
_HEAD = {
    "num_cpus": 1,
    "no_monitor": True,
    "_system_config": {
        "agent_register_timeout_ms": 1000 * _PATIENCE_S,
        "raylet_start_wait_time_s": _PATIENCE_S,
        "worker_register_timeout_seconds": _PATIENCE_S,
    },
}
_HELPERS = {
    "metrics_agent_port": "METRICS_AGENT_PORT_NAME",
    "metrics_export_port": "METRICS_EXPORT_PORT_NAME",
    "dashboard_agent_listen_port": "DASHBOARD_AGENT_LISTEN_PORT_NAME",
    "runtime_env_agent_port": "RUNTIME_ENV_AGENT_PORT_NAME",
}


@contextlib.contextmanager
def running() -> Iterator[Any]:
    """Start a head and a second node, with one CPU each. Ray Client's server is at ``client_address``."""
    utils = importlib.import_module("ray.cluster_utils")
    cluster = utils.Cluster()
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    cluster.client_address = f"ray://127.0.0.1:{port}"
    try:
        add_node(cluster, **_HEAD, ray_client_server_port=port)
        add_node(cluster, num_cpus=1)
        yield cluster
    finally:
        cluster.shutdown()


def add_node(cluster: Any, **what_it_has: Any) -> Any:
    """Add a node.

    Ray gives a node's processes 15 s to report their ports, and the node 30 s to be there, too few for a busy machine.
    So this function reports the ports for them.
    """
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("", 0))) for _ in _HELPERS]
        ports = {name: server.getsockname()[1] for name, server in zip(_HELPERS, servers, strict=True)}
    with _patiently(ports):
        return cluster.add_node(**_NODE, **ports, **what_it_has)


@contextlib.contextmanager
def _patiently(ports: dict[str, int]) -> Iterator[None]:
    raylet = importlib.import_module("ray._raylet")
    services = importlib.import_module("ray._private.services")
    node_class = importlib.import_module("ray._private.node").Node
    look, start = services.get_node, node_class.start_raylet

    def look_until_it_is_there(*where: Any) -> Any:
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return look(*where)
            except RuntimeError:  # it isn't there yet, or who knows of it is too busy to say
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.1)

    def say_ports_and_start(node: Any, *args: Any, **options: Any) -> None:
        for name, port in ports.items():
            raylet.persist_port(node.get_session_dir_path(), node.node_id, getattr(raylet, _HELPERS[name]), port)
        start(node, *args, **options)

    with (
        unittest.mock.patch.object(services, "get_node", look_until_it_is_there),
        unittest.mock.patch.object(node_class, "start_raylet", say_ports_and_start),
    ):
        yield
