"""What of the engine for clusters needs no cluster. ``tests/launching/ray`` has the rest."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest

from notebook_accel import notebook_launcher
from notebook_accel.config import LaunchConfig
from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError
from notebook_accel.launching.ray import cluster, connecting, connection, host, options, starting
from notebook_accel.protocol import events, ray_messages
from tests.launching import functions


def test_options_are_read_from_texts() -> None:
    read = options.read(("strategy=SPREAD", "gpus_per_rank=0.5", "resources={fast: 1}", "nodes=2", "address=a:1"))
    assert read == options.RayOptions(
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
        options.read((pair,))


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray, which isn't installed here") as caught:
        notebook_launcher(functions.rank, num_processes=2, engine="ray")
    assert "notebook-accel[ray]" in caught.value.fix


def test_address_is_tried_before_ray_looks_for_it_for_minutes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert connection.why_not_reached(address) == ""
    assert "Connection refused" in connection.why_not_reached(address)
    assert connection.why_not_reached("auto") == ""  # which Ray knows what to do with


def node_run() -> host._NodeRun:
    part = ray_messages.Part(
        job_id="1", name="run", options=b"", places=[RankPlace(4, 8, 0, 2), RankPlace(5, 8, 1, 2)], environment={}
    )
    return host._NodeRun(part, LaunchConfig())


def test_host_tells_everything_in_order_and_of_samples_the_newest() -> None:
    run = node_run()
    for step in range(100):
        for rank in (0, 1):
            run.deliver(rank, events.Progress(step=step, steps=step, total=100))
    run.deliver(1, events.Output(text="first"))
    run.deliver(0, events.Progress(step=100, steps=100, total=100))
    run.deliver(1, events.Output(text="second"))
    run.end("failed")
    told = ray_messages.decode(ray_messages.encode(ray_messages.News(time_s=1.0, said=run.outbox.take(1.0)))).said
    assert run.outbox.take(0.01) == []
    run.close()
    said = [(told.rank, events.decode(bytes(told.event))) for told in told[:-1] if isinstance(told, ray_messages.Said)]
    assert [(rank, type(event).__name__, getattr(event, "step", "")) for rank, event in said] == [
        (1, "Progress", 99),
        (1, "Output", ""),
        (0, "Progress", 100),
        (1, "Output", ""),
    ]
    assert told[-1] == ray_messages.Ended(reason="failed")


def test_host_waits_for_news_no_longer_than_it_is_asked_to() -> None:
    run = node_run()
    thread = threading.Timer(0.05, lambda: run.deliver(0, events.Started(pid=1)))
    thread.start()
    [told] = run.outbox.take(30.0)
    thread.join()
    run.close()
    assert isinstance(told, ray_messages.Said) and isinstance(events.decode(bytes(told.event)), events.Started)


def test_versions_are_what_has_to_be_the_same() -> None:
    found = host.versions()
    assert set(found) == {"Python", "torch", "notebook-accel"} and all(found.values())
    facts = ray_messages.Facts(versions=found, address="127.0.0.1", host="here", pid=1)
    assert msgspec.msgpack.decode(ray_messages.encode(facts), type=ray_messages.Facts) == facts


def test_clock_of_a_node_is_known_within_the_time_that_its_quickest_answer_took() -> None:
    part = starting.NodePart(cluster.Node("1", "127.0.0.1", (0,)), 0, None)
    ahead_s = 86_400.0  # the node's clock

    def answered(asked_s: float, sent_s: float, now_s: float, at_s: float) -> float:
        """Where an event of ``at_s`` is put after an answer; all by the kernel's clock."""
        part.asked_s = asked_s
        part.heard(sent_s + ahead_s, now_s)
        return part.by_our_clock(events.Started(time_s=at_s + ahead_s, pid=1)).time_s

    assert answered(asked_s=10.0, sent_s=10.9, now_s=11.0, at_s=10.5) == pytest.approx(10.6)
    assert answered(asked_s=11.0, sent_s=11.99, now_s=12.0, at_s=11.5) == pytest.approx(11.51)
    assert answered(asked_s=12.0, sent_s=12.5, now_s=14.0, at_s=12.5) == pytest.approx(12.51)  # the kernel was busy
    ahead_s -= 3600  # the node was suspended for an hour
    assert answered(asked_s=20.0, sent_s=20.2, now_s=21.0, at_s=20.2) == pytest.approx(20.0)
    ahead_s += 7200  # the kernel's machine was
    assert answered(asked_s=30.0, sent_s=30.2, now_s=30.3, at_s=30.2) == pytest.approx(30.3)


class _Library:
    """Stands for Ray, of whose client's server the process for a notebook fails so many times."""

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
    connecting._connect(library, "auto")
    assert library.asked == 3
    with pytest.raises(ConfigError, match=r"could not start a process for this notebook.*\n.*no such process"):
        connecting._connect(_Library(failures=9), "auto")
