"""Tests of the engine for Ray clusters that need no cluster."""

from __future__ import annotations

import socket

import pytest

from notebook_accel import notebook_launcher
from notebook_accel.errors import ConfigError
from notebook_accel.launching.ray import cluster, connection
from tests.launching import functions


def test_options_are_read_from_texts() -> None:
    read = cluster.read_options(
        ("strategy=SPREAD", "gpus_per_rank=0.5", "resources={fast: 1}", "nodes=2", "address=a:1")
    )
    assert read == cluster.RayOptions(
        strategy="SPREAD", gpus_per_rank=0.5, resources={"fast": 1.0}, nodes=2, address="a:1"
    )


@pytest.mark.parametrize(("pair", "said"), [
    ("speed=high", "The engine option 'speed=high' is not known"),
    ("strategy", "The engine option 'strategy' is not known"),
    ("strategy=FAST", "The engine option strategy='FAST' can't be used"),
    ("nodes=0", "The engine option nodes=0 can't be used"),
    ("wait_s=soon", "The engine option wait_s='soon' can't be used"),
    ("runtime_env=[", "The engine option runtime_env='\\[' can't be used"),
])  # fmt: skip
def test_option_that_cannot_be_is_named(pair: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cluster.read_options((pair,))


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray, which isn't installed here") as caught:
        notebook_launcher(functions.rank, num_processes=2, engine="ray")
    assert "pip install -e '.[ray]'" in caught.value.fix


def test_address_is_tried_before_ray_looks_for_it_for_minutes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert connection.why_not_reached(address) == ""
    assert "Connection refused" in connection.why_not_reached(address)
    assert connection.why_not_reached("auto") == ""  # which Ray knows what to do with


class _Library:
    """Stands for Ray, with a client's server whose process for a notebook fails so many times."""

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self.asked = 0

    def init(self, **_: object) -> None:
        self.asked += 1
        if self.asked <= self._failures:
            raise ConnectionAbortedError(
                "Initialization failure from server:\nTraceback\nRuntimeError: no such process"
            )


def test_process_of_ray_client_that_fails_is_asked_for_again() -> None:
    library = _Library(failures=2)
    connection._connect(library, "auto")
    assert library.asked == 3
    with pytest.raises(ConfigError, match=r"could not start a process for this notebook.*\n.*no such process"):
        connection._connect(_Library(failures=9), "auto")
