"""A rank's reports, read at the other end of a real connection."""

from __future__ import annotations

import functools
import math
import os
import signal
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
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


class Watcher:
    """The agent's end of the connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.events: list[events.Event] = []

    def wait_for(self, condition: Callable[[events.Event], bool], timeout_s: float = 60.0) -> events.Event:
        """Return the first event, past or future, for which the condition holds."""
        seen, deadline = 0, time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for event in self.events[seen:]:
                if condition(event):
                    return event
            seen = len(self.events)
            self.events += [events.decode(message.body) for message in self.connection.receive()]
        raise AssertionError(f"not among {self.events}")

    def read_to_the_end(self) -> None:
        with pytest.raises(ClosedError):
            while True:
                self.events += [events.decode(message.body) for message in self.connection.receive()]

    def of(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """This process as a rank: ``reporter`` sends, ``watcher`` receives, and ``end()`` ends the rank."""
    ours, theirs = Connection.pair()
    monkeypatch.setattr(reporting, "_reporter", None)  # so that the earlier reporter is restored
    reporter = reporting.connect(theirs)

    def end() -> None:
        reporter.close()
        theirs.close()

    yield types.SimpleNamespace(reporter=reporter, watcher=Watcher(ours), end=end)
    end()
    ours.close()


def _is_step(event: events.Event, steps: int) -> bool:
    return isinstance(event, events.Progress) and event.steps == steps


def test_counter_is_sampled(rank: types.SimpleNamespace) -> None:
    counter = reporting.Counter("batches", total=10)
    counter.start(epoch=1, total=10)
    counter.step += 3
    heard = rank.watcher.wait_for(lambda event: isinstance(event, events.Progress) and event.step == 3)
    assert (heard.total, heard.epoch, heard.steps, heard.label) == (10, 1, 3, "batches")


def test_steps_go_on_over_epochs(rank: types.SimpleNamespace) -> None:
    counter = reporting.Counter()
    for epoch in (1, 2):
        counter.start(epoch=epoch, total=4)
        counter.step += 4
    heard = rank.watcher.wait_for(lambda event: _is_step(event, 8))  # a sample in between may come earlier
    assert (heard.step, heard.epoch) == (4, 2)


def test_steps_go_on_over_loaders(rank: types.SimpleNamespace) -> None:
    training, evaluation = reporting.Counter("training"), reporting.Counter("evaluation")
    training.start(total=10)
    training.step += 6
    evaluation.start(total=3)
    evaluation.step += 3
    heard = rank.watcher.wait_for(lambda event: _is_step(event, 9))
    assert (heard.step, heard.label) == (3, "evaluation")
    rank.reporter.show(training)
    training.step += 1
    heard = rank.watcher.wait_for(lambda event: _is_step(event, 10))
    assert (heard.step, heard.label) == (7, "training")


def test_last_steps_are_said_at_the_end_though_the_loader_has_gone(rank: types.SimpleNamespace) -> None:
    counter = reporting.Counter()
    counter.start(total=7)
    counter.step += 7
    del counter
    rank.end()
    rank.watcher.read_to_the_end()
    assert rank.watcher.of(events.Progress)[-1].step == 7


def test_bar_around_the_shown_one_gives_the_epochs(rank: types.SimpleNamespace) -> None:
    outer, inner = reporting.Counter(total=5), reporting.Counter()
    outer.step = 2
    rank.reporter.outer = outer
    inner.start(total=3)
    heard = rank.watcher.wait_for(lambda event: isinstance(event, events.Progress))
    assert (heard.epoch, heard.epochs) == (3, 5)


def test_progress_that_stands_still_is_said_once(rank: types.SimpleNamespace) -> None:
    reporting.Counter().start(total=3)
    rank.watcher.wait_for(lambda event: isinstance(event, events.Progress))
    seen = len(rank.watcher.of(events.Memory))
    while len(rank.watcher.of(events.Memory)) < seen + 2:  # two more seconds of samples
        rank.watcher.events += [events.decode(message.body) for message in rank.watcher.connection.receive()]
    assert len(rank.watcher.of(events.Progress)) == 1


def test_metrics_of_every_kind_of_number(rank: types.SimpleNamespace) -> None:
    weight = torch.ones(1, requires_grad=True)
    notebook_accel.report(
        loss=(weight * 2).sum(), tensor=torch.tensor([3.0]), array=np.array([4.0]), rate=np.float32(5), steps=6
    )
    heard = rank.watcher.wait_for(lambda event: isinstance(event, events.Metrics))
    assert heard.values == {"loss": 2.0, "tensor": 3.0, "array": 4.0, "rate": 5.0, "steps": 6.0}


def test_latest_value_of_each_metric_is_said(rank: types.SimpleNamespace) -> None:
    with rank.reporter._sampling:  # however long this takes here, it is as if it took no time
        notebook_accel.report(accuracy=0.5)
        for step in range(100):
            notebook_accel.report(loss=step)
    rank.end()
    rank.watcher.read_to_the_end()
    assert rank.watcher.of(events.Metrics)[-1].values == {"accuracy": 0.5, "loss": 99.0}
    assert len(rank.watcher.of(events.Metrics)) <= 3  # sampled, not one a call


def test_metric_is_sent_once_with_the_step_at_which_it_was_reported(rank: types.SimpleNamespace) -> None:
    counter = reporting.Counter()
    counter.start(total=300)
    for epoch in (1, 2):
        with rank.reporter._sampling:  # no sample is taken meanwhile
            counter.step += 100
            notebook_accel.report(accuracy=epoch / 10)
            counter.step += 7
            notebook_accel.report(loss=epoch)
        rank.watcher.wait_for(
            lambda event, loss=epoch: isinstance(event, events.Metrics) and event.values["loss"] == loss
        )
    notebook_accel.report(loss=3)
    rank.end()
    rank.watcher.read_to_the_end()
    sent = [
        (event.values, {name: event.step_of(name) for name in event.values})
        for event in rank.watcher.of(events.Metrics)
    ]
    assert sent == [
        ({"accuracy": 0.1, "loss": 1}, {"accuracy": 100, "loss": 107}),
        ({"accuracy": 0.2, "loss": 2}, {"accuracy": 207, "loss": 214}),
        ({"loss": 3}, {"loss": 214}),
    ]


@pytest.mark.usefixtures("no_capture")
def test_number_on_a_gpu_has_the_step_of_its_report(rank: types.SimpleNamespace) -> None:
    counter = reporting.Counter()
    counter.start(total=3)
    for step in (1, 2, 3):
        with rank.reporter._sampling:
            counter.step = step
            notebook_accel.report(loss=on_gpu(float(step)))
    counter.step = 99
    rank.end()
    rank.watcher.read_to_the_end()
    sent = [(event.step, event.values["loss"]) for event in rank.watcher.of(events.Metrics)]
    assert sent[-1] == (3, 3.0)
    assert all(step == loss for step, loss in sent)


def test_signal_handler_may_report_while_its_thread_shows_a_counter(rank: types.SimpleNamespace) -> None:
    class SignalledCounter(reporting.Counter):
        @property
        def step(self) -> int:
            if threading.current_thread() is threading.main_thread() and not handled:
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
        rank.reporter.show(SignalledCounter())
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    rank.end()
    rank.watcher.read_to_the_end()
    sent = {name: event.step_of(name) for event in rank.watcher.of(events.Metrics) for name in event.values}
    assert sent == {"handled": 0}


def test_metric_that_there_is_no_room_for_is_named_once(rank: types.SimpleNamespace) -> None:
    shown = {f"m{number}": number for number in range(events.MOST_METRICS)}
    notebook_accel.report(**shown)
    with pytest.warns(UserWarning, match="The metric 'late' isn't shown") as warned:
        notebook_accel.report(late=1, m0=2, later=3)
    assert warned[0].filename == __file__
    notebook_accel.report(late=1)  # a second warning would be an error
    with Progress().count_cell():
        notebook_accel.report(next_cell=4)
    rank.end()
    rank.watcher.read_to_the_end()
    sent = {name: value for event in rank.watcher.of(events.Metrics) for name, value in event.values.items()}
    assert sent == {**shown, "m0": 2, "next_cell": 4}


@pytest.mark.parametrize("is_held", [False, True], ids=["", "held"])
def test_metric_is_the_number_at_the_report_though_its_tensor_changes_in_place(
    rank: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, is_held: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    meters = {"host": torch.tensor(0.5), "array": np.array([0.5]), "other": torch.tensor(0.5).as_subclass(Elsewhere)}
    if is_held:
        rank.reporter.hold_metrics()
    else:
        notebook_accel.report(gpu=on_gpu(0.25))  # the next copy of it doesn't start at once
        meters["gpu"] = on_gpu(0.5)
    with rank.reporter._sampling:  # no sample is taken meanwhile
        notebook_accel.report(**meters)
        rank.reporter.report_loss(loss := torch.tensor(0.5))
        for meter in (*meters.values(), loss):
            meter.fill(0) if isinstance(meter, np.ndarray) else meter.fill_(0)
    rank.end()
    rank.watcher.read_to_the_end()
    assert rank.watcher.of(events.Metrics)[-1].values == dict.fromkeys([*meters, "loss"], 0.5)


@pytest.mark.parametrize("value", [torch.ones(3), np.ones(2), "high", None, [1.0]])
def test_metric_that_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"report\(loss=...\) takes one number"):
        notebook_accel.report(loss=value)


def test_metrics_of_a_step_that_is_put_off_are_read_when_it_has_ended(rank: types.SimpleNamespace) -> None:
    class Lazy:
        """A stand-in for a tensor of a graph that isn't computed yet."""

        is_there = False
        size = 1

        def item(self) -> float:
            assert self.is_there, "read before its step had ended"
            return 0.5

    loss = Lazy()
    rank.reporter.hold_metrics()
    notebook_accel.report(loss=loss)
    rank.reporter._sample_now()
    loss.is_there = True
    rank.reporter.release_metrics()
    said = rank.watcher.wait_for(lambda event: isinstance(event, events.Metrics))
    assert said.values == {"loss": 0.5}
    notebook_accel.report(loss=0.25)
    rank.end()  # the last step's metrics are sent however it has ended
    rank.watcher.read_to_the_end()
    assert rank.watcher.of(events.Metrics)[-1].values == {"loss": 0.25}


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
    rank: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTEBOOK_ACCEL_CUDA_TELEMETRY", "0")  # after the reporter was made, as in a rank
    notebook_accel.report(loss=on_gpu(0.5), accuracy=0.75)
    rank.end()
    rank.watcher.read_to_the_end()
    assert [said.values for said in rank.watcher.of(events.Metrics)] == [{"accuracy": 0.75}]


@pytest.mark.usefixtures("no_capture")
def test_number_on_a_gpu_is_copied_by_the_thread_that_reports_it(rank: types.SimpleNamespace) -> None:
    notebook_accel.report(loss=on_gpu(0.5), broken=on_gpu(float("nan")))
    for name, is_right in [("loss", lambda number: number == 0.5), ("broken", math.isnan)]:
        said = rank.watcher.wait_for(
            lambda event, name=name: isinstance(event, events.Metrics) and name in event.values
        )
        assert is_right(said.values[name])
    with torch.inference_mode():
        notebook_accel.report(validation=on_gpu(0.75))
    for step in range(100):
        notebook_accel.report(loss=on_gpu(float(step)), validation=on_gpu(0.25))
    rank.end()  # the latest number is sent, though it came too soon after another
    rank.watcher.read_to_the_end()
    last = rank.watcher.of(events.Metrics)[-1].values
    assert (last["loss"], last["validation"]) == (99, 0.25)


@pytest.mark.usefixtures("no_capture")
def test_last_word_is_sent_although_a_number_never_comes(rank: types.SimpleNamespace) -> None:
    reporting.Counter().start(total=3)
    notebook_accel.report(loss=on_gpu(0.5, Stuck), accuracy=0.75)
    began_s = time.monotonic()
    assert rank.reporter.catch_up() == 0
    rank.end()
    assert time.monotonic() - began_s < 30
    rank.watcher.read_to_the_end()
    assert rank.watcher.of(events.Metrics)[-1].values == {"accuracy": 0.75}


def test_last_word_is_sent_although_the_sampling_thread_is_held_up(
    rank: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waiting:
        """A stand-in for a tensor of a library that can only wait."""

        size = 1

        def item(self) -> float:
            looks.set()
            return float(goes_on.wait(60))

    looks, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(reporting, "_CLOSE_DEADLINE_S", 0.5)
    counter = reporting.Counter()
    counter.start(total=3)
    notebook_accel.report(loss=Waiting())
    assert looks.wait(60)
    counter.step = 2
    assert rank.reporter.catch_up() == 2
    assert rank.watcher.wait_for(lambda event: _is_step(event, 2))
    goes_on.set()


def test_nothing_is_asked_of_a_gpu_while_a_graph_is_captured(
    rank: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replacement for CUDA's answer, since there is no GPU."""
    asked: list[int] = []

    def is_capturing() -> bool:
        asked.append(threading.get_ident())
        return len(asked) < 3

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
    notebook_accel.report(loss=on_gpu(0.25))
    assert len(rank.reporter._copies) == 0  # no memory was asked for either
    while len(asked) < 3:
        notebook_accel.report(loss=on_gpu(0.5))
    said = rank.watcher.wait_for(lambda event: isinstance(event, events.Metrics))
    assert said.values == {"loss": 0.5}
    assert set(asked) == {threading.get_ident()}


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


def _is_progress(event: events.Event, *, compiling: bool) -> bool:
    return isinstance(event, events.Progress) and event.compiling is compiling


def test_compiling_is_said(rank: types.SimpleNamespace) -> None:
    reporting.Counter().start(total=3)
    for compiling in (True, False):
        rank.reporter.is_compiling = compiling
        said = functools.partial(_is_progress, compiling=compiling)
        assert rank.watcher.wait_for(said)
    rank.end()


def test_memory_is_this_process_and_then_the_device(rank: types.SimpleNamespace) -> None:
    heard = rank.watcher.wait_for(lambda event: isinstance(event, events.Memory))
    assert heard.kind == "host"
    assert 10_000_000 < heard.used_bytes < heard.total_bytes
    rank.reporter.set_device("cuda:0", lambda: (5, 8))
    heard = rank.watcher.wait_for(lambda event: isinstance(event, events.Memory) and event.kind == "device")
    assert (heard.used_bytes, heard.total_bytes, heard.utilisation) == (5, 8, None)
    rank.reporter.set_device("cuda:0", lambda: (5, 8), lambda: 87.0, lambda: 61.0)
    heard = rank.watcher.wait_for(lambda event: isinstance(event, events.Memory) and event.utilisation == 87.0)
    assert heard.clock == 61.0


def test_device_that_fails_does_not_end_the_sampling(rank: types.SimpleNamespace) -> None:
    asked: list[float] = []

    def fails() -> tuple[int, int]:
        asked.append(time.monotonic())
        raise RuntimeError("device-side assert")

    rank.reporter.set_device("cuda:0", fails)
    processes.wait_until(lambda: asked, "the device was asked")
    notebook_accel.report(loss=1)
    assert rank.watcher.wait_for(lambda event: isinstance(event, events.Metrics))


def test_displays_come_in_their_turn(rank: types.SimpleNamespace) -> None:
    for number in range(3):
        rank.reporter.send(events.Display(data={"text/plain": str(number)}))
    rank.watcher.wait_for(lambda event: isinstance(event, events.Display) and event.data["text/plain"] == "2")
    assert [event.data["text/plain"] for event in rank.watcher.of(events.Display)] == ["0", "1", "2"]


def test_reader_that_has_gone_is_no_reason_to_fail(rank: types.SimpleNamespace) -> None:
    rank.watcher.connection.shutdown()
    rank.reporter.send(events.Started(pid=1))
    notebook_accel.report(loss=1)
    rank.end()
    assert "notebook-accel-reporter" not in [thread.name for thread in threading.enumerate()]


def test_process_that_the_rank_forks_says_nothing(rank: types.SimpleNamespace) -> None:
    pid = os.fork()
    if pid == 0:
        rank.reporter.send(events.Started(pid=os.getpid()))
        rank.reporter.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    rank.end()
    rank.watcher.read_to_the_end()
    assert rank.watcher.of(events.Started) == []


def test_process_that_is_forked_in_the_middle_of_a_look_ends(rank: types.SimpleNamespace) -> None:
    looks, goes_on = threading.Event(), threading.Event()
    rank.reporter.before_sample.append(lambda: (looks.set(), goes_on.wait(60)))
    assert looks.wait(60)
    pid = os.fork()
    if pid == 0:
        rank.reporter.close()
        os._exit(0)
    try:
        processes.wait_until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, "the fork has ended")
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        goes_on.set()


def test_outside_a_rank_nothing_happens() -> None:
    assert not reporting.reporter().is_connected
    reporting.Counter().start(total=3)
    reporting.reporter().send(events.Started(pid=1))
    tensor = torch.ones(1)
    kept = weakref.ref(tensor)
    notebook_accel.report(loss=tensor)
    del tensor
    assert kept() is None


def test_position_and_what_is_called_at_the_end() -> None:
    reporter = reporting.Reporter()
    called: list[str] = []
    reporter.at_close.append(lambda: called.append(reporter.position()))
    reporter.at_close.append(called.clear)
    reporter.at_close.remove(called.clear)
    assert reporter.position() == ""
    counter = reporting.Counter()
    reporter.begin(counter, epoch=2, total=40)
    counter.step = 12
    assert reporter.position() == "step 12 of 40, epoch 2"
    counter.total = counter.epoch = None
    reporter.close()
    assert called == ["step 12"]
