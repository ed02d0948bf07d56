"""A real Ray cluster of two nodes on this machine, shared by all tests of this folder."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("ray") is None:
        for item in items:
            if "ray" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="NOT TESTED: Ray isn't installed. .ci/ray does both"))


_HEAD = {"num_cpus": 1, "include_dashboard": False}
_MOST_TRIES = 4


def _started(start: Callable[[], Any]) -> Any:
    """Ray gives up after 30 s, which are too few where something else keeps the processors busy."""
    for _ in range(_MOST_TRIES - 1):
        try:
            return start()
        except Exception as error:  # it has no class of its own
            if "timed out during startup" not in str(error):
                raise
    return start()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    """In the place of the fixture of that name: Ray's own processes come and go. Tests look for ranks themselves."""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A head and a second node, with one CPU each. Ranks find this project where this process does."""
    ray = importlib.import_module("ray")
    utils = importlib.import_module("ray.cluster_utils")
    made = _started(lambda: utils.Cluster(initialize_head=True, head_node_args=_HEAD))
    _started(lambda: made.add_node(num_cpus=1))
    os.environ["RAY_ADDRESS"] = made.address
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
        del os.environ["RAY_ADDRESS"]
