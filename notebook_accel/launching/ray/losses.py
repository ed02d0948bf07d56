"""What is said of a run that can't go on because something of the cluster has gone."""

from __future__ import annotations

from notebook_accel.errors import SupervisorLostError
from notebook_accel.launching.ray.cluster import Cluster, Node

__all__ = ["last_line", "of_host", "of_run"]


def of_run(error: BaseException) -> SupervisorLostError:
    """Nobody knows more than that error says."""
    return SupervisorLostError("The run was lost on the cluster.", why=f"{type(error).__name__}: {str(error).strip()}")


def of_host(cluster: Cluster, node: Node, ranks: str, error: Exception) -> SupervisorLostError:
    """A node's host doesn't answer, because of which its ranks are lost."""
    lost = f"The node {node.address} has gone, and {ranks} with it."
    if cluster.is_alive(node):
        lost = f"What runs {ranks} on the node {node.address} was ended, or doesn't answer."
    return SupervisorLostError(
        lost, why=last_line(error), fix="run the cell again; max_restarts lets a run go on by itself on what is left"
    )


def last_line(error: BaseException) -> str:
    """Of what an error of Ray's says, which has the node's traceback before it."""
    return [type(error).__name__, *str(error).strip().splitlines()][-1]
