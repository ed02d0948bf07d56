"""The clock of a rank's phases."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from notebook_accel import host_memory, reporting
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.ranks import profiling
from notebook_accel.launching.ranks.phases import StepClock, place_of
from notebook_accel.protocol import agent_messages, events
from tests import processes
from tests.launching.ranks import training_loops
from tests.test_reporting import Received


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A clock, and a reporter whose sampling thread doesn't run. ``end()`` stops both and returns what was sent."""
    received = Received()
    reporter, clock = reporting.Reporter(received), StepClock()
    monkeypatch.setattr(reporting, "_reporter", reporter)

    def end() -> list[events.StepTimes]:
        clock.stop()
        reporter.close()
        return received.of(events.StepTimes)

    return types.SimpleNamespace(clock=clock, reporter=reporter, end=end)


def test_phases_add_up_to_the_wall_time_whenever_they_are_sent(rank: types.SimpleNamespace) -> None:
    began_s = rank.clock.enter("data")
    for step in range(100):
        for phase in ("forward", "backward", "other", "optimizer", "other", "data"):
            rank.clock.enter(phase)
        rank.clock.begin_step(None)
        if step % 40 == 0:
            rank.clock.send()  # in the middle of a phase
    ended_s = rank.clock.enter("data")
    sent = rank.end()
    assert (len(sent), sum(event.steps for event in sent)) == (4, 100)
    assert sum(sum(event.seconds.values()) for event in sent) == pytest.approx(ended_s - began_s)
    assert set(sent[-1].seconds) == set(events.PHASES)


def test_no_time_passes_while_the_clock_stands(rank: types.SimpleNamespace) -> None:
    rank.clock.enter("forward")
    rank.clock.begin_step(None)
    rank.clock.stop()
    time.sleep(0.2)  # the time that must not be there
    began_s = rank.clock.enter("forward")
    rank.clock.begin_step(None)
    ended_s = rank.clock.enter("other")
    assert sum(rank.end()[-1].seconds.values()) == pytest.approx(ended_s - began_s)


def test_nothing_is_sent_without_a_step(rank: types.SimpleNamespace) -> None:
    rank.clock.enter("data")
    rank.clock.send()
    assert rank.end() == []


def test_fast_steps_are_measured_in_parts_that_stand_for_the_others(rank: types.SimpleNamespace) -> None:
    """And the phases add up to the wall time with the rest and what follows it."""
    gap_s = 0.3
    began_s = rank.clock.enter("forward")
    for _ in range(1000):
        rank.clock.begin_step(None)
    assert not rank.clock.sample()  # and so it needn't look again so soon
    rank.clock.begin_step(None)
    assert (rank.clock.is_on, rank.clock.phase) == (False, "")
    processes.wait_until(rank.clock.sample, "it measures again", 30.0)
    assert rank.clock.is_on
    time.sleep(gap_s)  # the time of something around the steps
    rank.clock.enter("forward")
    rank.clock.begin_step(None)
    ended_s = rank.clock.enter("other")
    times = rank.end()
    assert sum(sum(sent.seconds.values()) for sent in times) == pytest.approx(ended_s - began_s, rel=0.02)
    # The scaled times of measured steps may have a part of it too.
    assert sum(sent.seconds["other"] for sent in times) > 0.9 * gap_s - 0.01
    assert sum(sent.steps for sent in times) > 1001


def test_steps_that_take_longer_are_all_measured(rank: types.SimpleNamespace) -> None:
    for _ in range(3):
        rank.clock.enter("forward")
        time.sleep(0.02)  # the time of a step
        rank.clock.begin_step(None)
    assert rank.clock.sample()
    rank.clock.begin_step(None)
    assert (rank.clock.is_on, rank.clock.phase) == (True, "forward")


def times_of(job: Job) -> events.StepTimes:
    """Return the times of all steps of the one rank, when it has returned."""
    job.results(timeout_s=60)
    times = job.ranks[0].step_history.total
    assert times is not None
    return times


def test_phases_of_a_ranks_steps_are_measured(launch: Callable[..., Job]) -> None:
    times = times_of(launch(training_loops.epochs_and_evaluations, num_processes=1))
    assert times.steps > 0  # of fast steps, some are measured and stand for the others
    assert all(times.seconds[phase] > 0 for phase in ("data", "forward", "backward", "optimizer"))


def test_only_passes_that_exchange_gradients_communicate(rank: types.SimpleNamespace) -> None:
    """Of four passes that took a second each, one has exchanged gradients, for half of it."""
    logged = {"backward_comm_time": 600_000_000, "backward_compute_comm_overlap_time": 100_000_000}
    data = types.SimpleNamespace(ints_map={"backward_comm_time_end": 1, **logged})
    model = torch.nn.Module()
    model.device_type = "meta"  # type: ignore[assignment]  # not measured by torch
    model.logger = types.SimpleNamespace(_get_ddp_logging_data=lambda: data)  # type: ignore[assignment]
    rank.clock.add_model(model)
    rank.clock.enter("backward")
    for number in range(8):
        model.require_backward_grad_sync = number % 4 == 3  # type: ignore[assignment]
        rank.clock.end_backward(1.0)
        if number % 4 == 3:
            rank.clock.begin_step(None)
            rank.clock.send()  # the second exchange isn't measured yet, and counts like the first one
    times = rank.end()
    for sent in times:
        communication_s, backward_s = sent.seconds["communication"], sent.seconds["backward"]
        assert communication_s / (communication_s + backward_s) == pytest.approx(0.5 / 4)
    assert len(times) == 2


class Exchanges:
    """Backward passes of a second each, and DDP's measurement of their exchanges."""

    def __init__(self, clock: StepClock) -> None:
        self._clock, self._number = clock, 0
        self._logged = {"backward_compute_comm_overlap_time": 0}
        clock.enter("backward")
        self.begin_model()

    def begin_model(self) -> None:
        self._model = model = torch.nn.Module()
        model.device_type, model.require_backward_grad_sync = "meta", True  # type: ignore[assignment]
        data = types.SimpleNamespace(ints_map=self._logged)
        model.logger = types.SimpleNamespace(_get_ddp_logging_data=lambda: data)  # type: ignore[assignment]
        self._clock.add_model(model)

    def add(self, *took_ms: int) -> None:
        for each_ms in took_ms:
            self._number += 1
            self._logged["backward_comm_time_end"] = self._number
            self._logged["backward_comm_time"] = each_ms * 1_000_000
            self._clock._counts.is_reading_due = True
            self._clock.end_backward(1.0)
        self._clock.begin_step(None)
        self._clock.send()


def shares_of(sent: events.StepTimes) -> list[float]:
    return [sent.seconds[phase] / sum(sent.seconds.values()) for phase in ("communication", "waiting", "backward")]


def test_rank_that_waits_in_some_steps_communicates_as_long_as_in_the_fastest(rank: types.SimpleNamespace) -> None:
    Exchanges(rank.clock).add(*[100, 500] * 20)
    [sent] = rank.end()
    assert shares_of(sent) == pytest.approx([0.1, 0.2, 0.7], abs=0.01)


@pytest.mark.parametrize("change", ["another model", "a slower network"])
def test_communication_that_takes_longer_than_earlier_is_no_waiting(
    rank: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    exchanges = Exchanges(rank.clock)
    exchanges.add(*[100] * 40)
    if change == "another model":
        exchanges.begin_model()
    else:
        original = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: original() + 60)
    exchanges.add(*[500] * 10)
    _, sent = rank.end()
    assert shares_of(sent) == pytest.approx([0.5, 0.0, 0.5], abs=0.01)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(20, 3))


def inference_with_workers_that_start_anew() -> None:
    for _ in range(3):
        with torch.inference_mode():
            for batch in DataLoader(Stream(), batch_size=8, num_workers=1):
                batch.sum()


def test_inference_has_steps_and_the_start_of_workers_is_a_wait_for_data(launch: Callable[..., Job]) -> None:
    times = times_of(launch(inference_with_workers_that_start_anew, num_processes=1))
    assert (times.steps, times.evaluations, times.workers, times.is_stream) == (9, 0, 1, True)
    assert times.seconds["data"] >= times.starting_s > times.seconds["other"]


def steps_while_the_profiler_takes_long() -> None:
    profiling.PROFILER.take(agent_messages.Profile(job_id="", number="1", steps=1, begin_s=0.0, deadline_s=60.0))
    recorder = profiling.PROFILER._current.recorder  # type: ignore[union-attr]
    recorder.begin = lambda: f"it slept: {time.sleep(1)}"  # type: ignore[method-assign,func-returns-value]
    list(DataLoader(torch.ones(4, 3), batch_size=2))  # type: ignore[arg-type]


def test_time_of_the_profiler_is_no_time_of_the_program(launch: Callable[..., Job]) -> None:
    times = times_of(launch(steps_while_the_profiler_takes_long, num_processes=1))
    assert times.steps == 2
    assert sum(times.seconds.values()) < 1.0  # the profiler alone took as long


def test_line_that_copies_and_computes_is_a_copy_only_until_it_computes() -> None:
    seen: list[str] = []
    layer = torch.nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: seen.append(place_of(sys._getframe(1))[0]))
    layer(torch.ones(2, 2).to("cpu"))
    seen.append(place_of(sys._getframe())[0])  # as in x.to(device)
    assert seen == ["", "copy"]


def model_that_was_trained_and_dropped() -> bool:
    import gc
    import weakref

    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    kept = weakref.ref(model.module)
    del model, optimizer
    gc.collect()
    return kept() is None


def test_measuring_keeps_no_model_alive(launch: Callable[..., Job]) -> None:
    assert list(launch(model_that_was_trained_and_dropped, num_processes=1).results(timeout_s=60)) == [True]


def test_recompilation_is_sent_with_the_shape_that_changed(rank: types.SimpleNamespace) -> None:
    double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
    for length in (4, 5):
        rank.clock.enter("forward")
        double(torch.ones(length))
        rank.clock.begin_step(None)
        rank.clock.send()
    first, second = rank.end()
    assert (first.compilations, first.recompiled) == (1, "")
    assert (second.compilations, second.recompiled.partition(": ")[2]) == (
        1,
        "tensor 'x' size mismatch at index 0. expected 4, actual 5",
    )


def test_compilations_of_xla_are_sent_with_their_time(
    rank: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch_xla isn't there, so its counters are made up."""
    counters: list[tuple[int, float, list[float]] | None] = [None]
    metrics = types.SimpleNamespace(metric_data=lambda name: counters[-1] if name == "CompileTime" else None)
    monkeypatch.setitem(sys.modules, "torch_xla.debug.metrics", metrics)  # type: ignore[arg-type]
    for data in ((3, 2e9, []), (4, 2.5e9, []), (5, 32.5e9, [])):
        rank.clock.enter("forward")
        rank.clock._since_s -= 3.0
        counters.append(data)
        if data[0] == 4:
            rank.reporter.recompiled = "The batch's shape has changed from (4, 8) to (3, 8)."
        rank.clock.begin_step(None)
        rank.clock.send()
    *known, outside = times = rank.end()
    assert [(sent.compilations, sent.compiling_s) for sent in known] == [(3, 2.0), (1, 0.5)]
    assert outside.compiling_s == sum(outside.seconds.values())  # the rest of 30 s was before the loop
    reasons = [sent.recompiled for sent in times]
    assert reasons == ["", "The batch's shape has changed from (4, 8) to (3, 8)", ""]


def test_waiting_for_a_core_is_sent(rank: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.CoreWatch, "take", lambda _: 0.5)
    rank.clock.sample()  # it is measured from here on
    rank.clock.enter("forward")
    rank.clock.begin_step(None)
    [sent] = rank.end()
    assert sent.queued_s == pytest.approx(0.5 * sum(sent.seconds.values()))
