"""A rank's reports. Most are sampled here when the test says so, and read where they are sent to."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import pytest
import torch

import notebook_accel
from notebook_accel import reporting
from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError
from notebook_accel.launching.ranks.progress import Progress
from notebook_accel.protocol import events
from notebook_accel.protocol.channel import ClosedError, Connection
from notebook_accel.training.backends.devices import clock_of
from notebook_accel.training.backends.single_process import SingleProcess
from tests import processes


class Received:
    """Takes a reporter's events in this process."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []

    def send(self, body: bytes) -> None:
        self.events.append(events.decode(body))

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def progress(self) -> events.Progress:
        """The latest progress."""
        return self.of(events.Progress)[-1]

    @property
    def metrics(self) -> dict[str, float]:
        """The latest metrics."""
        return self.of(events.Metrics)[-1].values


@pytest.fixture
def received() -> Received:
    return Received()


@pytest.fixture
def rank(received: Received, monkeypatch: pytest.MonkeyPatch) -> reporting.Reporter:
    """This process as a rank whose sampling thread doesn't run: ``catch_up`` takes a sample."""
    reporter = reporting.Reporter(received)
    monkeypatch.setattr(reporting, "_reporter", reporter)
    return reporter


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """This process as a rank that samples in a thread, and the agent's end of its real connection."""
    ours, theirs = Connection.pair()
    monkeypatch.setattr(reporting, "_SAMPLE_PERIOD_S", 0.02)
    monkeypatch.setattr(reporting, "_reporter", None)  # so that the earlier reporter is restored
    reporter, received = reporting.connect(theirs), Received()

    def end() -> None:
        """End the rank and receive what it has sent."""
        reporter.close()
        theirs.close()
        with pytest.raises(ClosedError):
            while True:
                for message in ours.receive():
                    received.send(message.body)

    yield types.SimpleNamespace(reporter=reporter, connection=ours, received=received, end=end)
    reporter.close()
    theirs.close()
    ours.close()


# The sampling thread --------------------------------------------------------------------------------------------------


def test_thread_samples_what_has_changed(connected: types.SimpleNamespace) -> None:
    looks: list[int] = []
    connected.reporter.before_sample.append(lambda: looks.append(1))
    counter = reporting.Counter("batches", total=10)
    counter.start(epoch=1, total=10)
    counter.step += 3
    notebook_accel.report(loss=1)
    for number in range(3):
        connected.reporter.send(events.Display(data={"text/plain": str(number)}))
    processes.wait_until(lambda: len(looks) > 6, "it has looked again and again")
    connected.reporter.set_device("cuda:0", lambda: (5, 8))
    processes.wait_until(lambda: len(looks) > 13, "it has asked the device")
    connected.end()
    received = connected.received
    [heard] = [event for event in received.of(events.Progress) if event.step == 3 and not event.device]
    assert (heard.total, heard.epoch, heard.steps, heard.label) == (10, 1, 3, "batches")
    assert [event.values for event in received.of(events.Metrics)] == [{"loss": 1}]
    assert [event.data["text/plain"] for event in received.of(events.Display)] == ["0", "1", "2"]
    assert {event.kind for event in received.of(events.Memory)} == {"host", "device"}


def test_last_steps_are_said_at_the_end_though_the_loader_has_gone(connected: types.SimpleNamespace) -> None:
    counter = reporting.Counter()
    counter.start(total=7)
    counter.step += 7
    del counter
    connected.end()
    assert connected.received.progress.step == 7


def test_last_word_is_sent_although_the_sampling_thread_is_held_up(
    connected: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waiting:
        """A stand-in for a tensor of a library that can only wait."""

        size = 1

        def item(self) -> float:
            looks.set()
            return float(goes_on.wait(60))

    looks, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(reporting, "_PATIENCE_S", 0.05)
    counter = reporting.Counter()
    counter.start(total=3)
    notebook_accel.report(loss=Waiting())
    assert looks.wait(60)
    counter.step = 2
    assert connected.reporter.catch_up() == 2
    goes_on.set()
    connected.end()
    assert connected.received.progress.step == 2


def test_reader_that_has_gone_is_no_reason_to_fail(connected: types.SimpleNamespace) -> None:
    connected.connection.shutdown()
    connected.reporter.send(events.Started(pid=1))
    notebook_accel.report(loss=1)
    connected.reporter.close()
    assert "notebook-accel-reporter" not in [thread.name for thread in threading.enumerate()]


def test_process_that_is_forked_in_the_middle_of_a_look_says_nothing_and_ends(connected: types.SimpleNamespace) -> None:
    looks, goes_on = threading.Event(), threading.Event()
    connected.reporter.before_sample.append(lambda: (looks.set(), goes_on.wait(60)))
    assert looks.wait(60)
    pid = os.fork()
    if pid == 0:
        connected.reporter.send(events.Started(pid=os.getpid()))
        connected.reporter.close()
        os._exit(0)
    try:
        processes.wait_until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, "the fork has ended")
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        goes_on.set()
    connected.end()
    assert connected.received.of(events.Started) == []


# Steps ----------------------------------------------------------------------------------------------------------------


def test_steps_go_on_over_epochs_and_loaders(rank: reporting.Reporter, received: Received) -> None:
    training, evaluation = reporting.Counter("training"), reporting.Counter("evaluation")
    for epoch in (1, 2):
        training.start(epoch=epoch, total=10)
        training.step += 6
    assert rank.catch_up() == 12
    assert (received.progress.step, received.progress.epoch) == (6, 2)
    evaluation.start(total=3)
    evaluation.step += 3
    assert rank.catch_up() == 15
    assert (received.progress.step, received.progress.label) == (3, "evaluation")
    rank.show(training)
    training.step += 1
    assert rank.catch_up() == 16
    assert (received.progress.step, received.progress.label) == (7, "training")


def test_bar_around_the_shown_one_gives_the_epochs(rank: reporting.Reporter, received: Received) -> None:
    outer, inner = reporting.Counter(total=5), reporting.Counter()
    outer.step = 2
    rank.outer = outer
    inner.start(total=3)
    rank.catch_up()
    assert (received.progress.epoch, received.progress.epochs) == (3, 5)


def test_progress_that_stands_still_is_said_once(rank: reporting.Reporter, received: Received) -> None:
    reporting.Counter().start(total=3)
    for compiling in (False, False, True, True):
        rank.is_compiling = compiling
        rank.catch_up()
    assert [event.compiling for event in received.of(events.Progress)] == [False, True]


def test_position_and_what_is_called_at_the_end() -> None:
    reporter = reporting.Reporter()
    called: list[str] = []
    reporter.at_close.append(lambda: called.append(reporter.position()))
    assert reporter.position() == ""
    counter = reporting.Counter()
    reporter.begin(counter, epoch=2, total=40)
    counter.step = 12
    assert reporter.position() == "step 12 of 40, epoch 2"
    counter.total = counter.epoch = None
    reporter.close()
    assert called == ["step 12"]


# Metrics --------------------------------------------------------------------------------------------------------------


def test_metrics_of_every_kind_of_number(rank: reporting.Reporter, received: Received) -> None:
    weight = torch.ones(1, requires_grad=True)
    notebook_accel.report(
        loss=(weight * 2).sum(), tensor=torch.tensor([3.0]), array=np.array([4.0]), rate=np.float32(5), steps=6
    )
    rank.catch_up()
    assert received.metrics == {"loss": 2.0, "tensor": 3.0, "array": 4.0, "rate": 5.0, "steps": 6.0}


@pytest.mark.parametrize("value", [torch.ones(3), np.ones(2), "high", None, [1.0]])
def test_metric_that_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"report\(loss=...\) takes one number"):
        notebook_accel.report(loss=value)


def test_latest_value_of_each_metric_is_sent_once_with_its_step(rank: reporting.Reporter, received: Received) -> None:
    counter = reporting.Counter()
    counter.start(total=300)
    for epoch in (1, 2):
        counter.step += 100
        notebook_accel.report(accuracy=epoch / 10)
        for _ in range(7):
            counter.step += 1
            notebook_accel.report(loss=epoch)
        rank.catch_up()
    notebook_accel.report(loss=3)
    rank.close()
    sent = [
        (event.values, {name: event.step_of(name) for name in event.values}) for event in received.of(events.Metrics)
    ]
    assert sent == [
        ({"accuracy": 0.1, "loss": 1}, {"accuracy": 100, "loss": 107}),
        ({"accuracy": 0.2, "loss": 2}, {"accuracy": 207, "loss": 214}),
        ({"loss": 3}, {"loss": 214}),
    ]


def test_signal_handler_may_report_while_its_thread_shows_a_counter(
    rank: reporting.Reporter, received: Received
) -> None:
    class SignalledCounter(reporting.Counter):
        @property
        def step(self) -> int:
            if not handled:
                signal.raise_signal(signal.SIGUSR1)
            return 7

        @step.setter
        def step(self, value: int) -> None: ...

    handled: list[int] = []

    def handle(number: int, _: object) -> None:
        handled.append(number)
        notebook_accel.report(handled=1)

    earlier = signal.signal(signal.SIGUSR1, handle)
    try:
        rank.show(SignalledCounter())
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    rank.close()
    assert received.of(events.Metrics)[-1].step_of("handled") == 0


def test_metric_that_there_is_no_room_for_is_named_once(rank: reporting.Reporter, received: Received) -> None:
    shown = {f"m{number}": number for number in range(events.MOST_METRICS)}
    notebook_accel.report(**shown)
    with pytest.warns(UserWarning, match="The metric 'late' isn't shown") as warned:
        notebook_accel.report(late=1, m0=2, later=3)
    assert warned[0].filename == __file__
    notebook_accel.report(late=1)  # a second warning would be an error
    with Progress().count_cell():
        notebook_accel.report(next_cell=4)
    rank.close()
    sent = {name: value for event in received.of(events.Metrics) for name, value in event.values.items()}
    assert sent == {**shown, "m0": 2, "next_cell": 4}


@pytest.mark.usefixtures("no_capture")
@pytest.mark.parametrize("is_held", [False, True], ids=["", "held"])
def test_metric_is_the_number_at_the_report_though_its_tensor_changes_in_place(
    rank: reporting.Reporter, received: Received, is_held: bool
) -> None:
    meters = {"host": torch.tensor(0.5), "array": np.array([0.5]), "other": torch.tensor(0.5).as_subclass(Elsewhere)}
    if is_held:
        rank.hold_metrics()
    else:
        notebook_accel.report(gpu=on_gpu(0.25))  # the next copy of it doesn't start at once
        meters["gpu"] = on_gpu(0.5)
    notebook_accel.report(**meters)
    rank.report_loss(loss := torch.tensor(0.5))
    for meter in (*meters.values(), loss):
        meter.fill(0) if isinstance(meter, np.ndarray) else meter.fill_(0)
    rank.close()
    assert received.metrics == dict.fromkeys([*meters, "loss"], 0.5)


def test_metrics_of_a_step_that_is_put_off_are_read_when_it_has_ended(
    rank: reporting.Reporter, received: Received
) -> None:
    class Lazy:
        """A stand-in for a tensor of a graph that isn't computed yet."""

        is_there = False
        size = 1

        def item(self) -> float:
            assert self.is_there, "read before its step had ended"
            return 0.5

    loss = Lazy()
    rank.hold_metrics()
    notebook_accel.report(loss=loss)
    rank.catch_up()
    loss.is_there = True
    rank.release_metrics()
    rank.catch_up()
    assert received.metrics == {"loss": 0.5}
    notebook_accel.report(loss=0.25)
    rank.close()  # the last step's metrics are sent however it has ended
    assert received.metrics == {"loss": 0.25}


def test_outside_a_rank_nothing_happens() -> None:
    assert not reporting.reporter().is_connected
    reporting.Counter().start(total=3)
    reporting.reporter().send(events.Started(pid=1))
    tensor = torch.ones(1)
    kept = weakref.ref(tensor)
    notebook_accel.report(loss=tensor)
    del tensor
    assert kept() is None


# GPUs -----------------------------------------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU. Its copy arrives at once, since it is on the CPU."""

    is_cuda = True  # type: ignore[assignment]

    def item(self) -> float:
        raise AssertionError("CUDA's work was waited for")


class Stuck(OnGpu):
    """A tensor whose GPU waits for ever: a copy writes nothing, and a wait for the copy doesn't end."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.copy_:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})

    def item(self) -> float:
        threading.Event().wait()
        raise AssertionError


class Elsewhere(torch.Tensor):
    """A tensor that claims to be on a device that is neither the host nor a GPU."""

    is_cpu = False  # type: ignore[assignment]


@pytest.fixture
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch for CPUs has only a dummy of this function."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def on_gpu(value: float, kind: type[torch.Tensor] = OnGpu) -> torch.Tensor:
    return torch.tensor(value).as_subclass(kind)


@pytest.mark.usefixtures("no_capture")
def test_number_on_a_gpu_stays_there_if_that_is_switched_off(
    rank: reporting.Reporter, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTEBOOK_ACCEL_CUDA_TELEMETRY", "0")  # after the reporter was made, as in a rank
    notebook_accel.report(loss=on_gpu(0.5), accuracy=0.75)
    rank.close()
    assert received.metrics == {"accuracy": 0.75}


@pytest.mark.usefixtures("no_capture")
def test_number_on_a_gpu_is_copied_and_has_the_step_of_its_report(rank: reporting.Reporter, received: Received) -> None:
    counter = reporting.Counter()
    counter.start(total=100)
    notebook_accel.report(loss=on_gpu(0.5), broken=on_gpu(float("nan")))
    rank.catch_up()
    assert received.metrics["loss"] == 0.5 and math.isnan(received.metrics["broken"])
    with torch.inference_mode():
        notebook_accel.report(validation=on_gpu(0.75))
    for step in range(100):
        counter.step = step
        notebook_accel.report(loss=on_gpu(float(step)), validation=on_gpu(0.25))
    counter.step = 100
    rank.close()  # the latest number is sent, though it came too soon after another
    last = received.of(events.Metrics)[-1]
    assert (last.values["loss"], last.step_of("loss"), received.metrics["validation"]) == (99, 99, 0.25)


@pytest.mark.usefixtures("no_capture")
def test_last_word_is_sent_although_a_number_never_comes(
    rank: reporting.Reporter, received: Received, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_PATIENCE_S", 0.05)
    reporting.Counter().start(total=3)
    notebook_accel.report(loss=on_gpu(0.5, Stuck), accuracy=0.75)
    assert rank.catch_up() == 0
    rank.close()
    assert received.metrics == {"accuracy": 0.75}


def test_nothing_is_asked_of_a_gpu_while_a_graph_is_captured_or_by_the_sampling_thread(
    connected: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement for CUDA's answer, since there is no GPU."""
    asked: list[int] = []
    looks: list[int] = []

    def is_capturing() -> bool:
        asked.append(threading.get_ident())
        return len(asked) < 3

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
    connected.reporter.before_sample.append(lambda: looks.append(1))
    notebook_accel.report(loss=on_gpu(0.25))
    assert len(connected.reporter._copies) == 0  # no memory was asked for either
    while len(asked) < 3:
        notebook_accel.report(loss=on_gpu(0.5))
    seen = len(looks)
    processes.wait_until(lambda: len(looks) > seen + 1, "it has looked")
    connected.end()
    assert connected.received.metrics == {"loss": 0.5}
    assert set(asked) == {threading.get_ident()}


def test_memory_is_this_process_or_the_device(rank: reporting.Reporter, received: Received) -> None:
    rank.send_memory()
    rank.set_device("cuda:0", lambda: (5, 8))
    rank.send_memory()
    rank.set_device("cuda:0", lambda: (5, 8), lambda: 87.0, lambda: 61.0)
    rank.send_memory()

    def fails() -> tuple[int, int]:
        raise RuntimeError("device-side assert")

    rank.set_device("cuda:0", fails)
    rank.send_memory()  # which mustn't end the sampling
    host, device, busy = received.of(events.Memory)
    assert (host.kind, device.kind, busy.kind) == ("host", "device", "device")
    assert 10_000_000 < host.used_bytes < host.total_bytes
    assert (device.used_bytes, device.total_bytes, device.utilisation) == (5, 8, None)
    assert (busy.utilisation, busy.clock) == (87.0, 61.0)


def test_memory_of_a_gpu_is_asked_for_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of NVML and torch are replaced, since there is no GPU."""

    def refuse(*_: object) -> NoReturn:
        raise AssertionError("a call of CUDA's")

    memory = types.SimpleNamespace(used=3 << 30, total=80 << 30)
    nvml = types.SimpleNamespace(nvmlDeviceGetMemoryInfo=lambda handle: memory if handle == "cuda:1" else refuse())
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", str)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(total_memory=79 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 1 << 30)
    ask = SingleProcess(RankPlace(), torch.device("cuda", 1)).memory()
    assert ask is not None and ask() == (3 << 30, 80 << 30)
    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", refuse)  # as in a container without NVML
    assert ask() == (1 << 30, 79 << 30)


def test_clock_of_a_gpu_in_per_cent_of_its_highest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers of NVML and torch are replaced, since there is no GPU."""
    clocks = {("cuda:1", 1): 1208}
    nvml = types.SimpleNamespace(
        NVML_CLOCK_SM=1,
        nvmlDeviceGetClockInfo=lambda handle, kind: clocks[handle, kind],
        nvmlDeviceGetMaxClockInfo=lambda *_: 1980,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "_get_pynvml_handler", str)
    ask = clock_of(torch.device("cuda", 1))
    assert ask is not None and ask() == pytest.approx(61.01, abs=0.01)
    clocks.clear()  # as for a part of a GPU
    assert ask() is None
    assert clock_of(torch.device("cpu")) is None
