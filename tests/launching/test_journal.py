"""The journal of a run: what it keeps, how it stays within bounds, and what is read of a damaged one."""

from __future__ import annotations

import itertools
import os
import pathlib
import random
import resource
from collections.abc import Iterator

import hypothesis
import msgspec
import pytest
from hypothesis import strategies

from notebook_accel.launching import journal
from notebook_accel.launching.journal import Journal
from notebook_accel.launching.state.diagnosis import diagnose
from notebook_accel.launching.state.step_times import StepHistory
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from tests.launching.state.strategies import replay
from tests.launching.state.test_diagnosis import healthy, step_times

_MIB = 1 << 20


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Book:
    """A journal in a file, or first in memory, with a clock of its own."""

    def __init__(self, path: pathlib.Path, world_size: int = 1, *, in_memory: bool = False) -> None:
        self.path = path
        self.clock = Clock()
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.journal = Journal("run", world_size, self.clock)
        if not in_memory:
            self.journal.move_to(self.descriptor)

    def tell(self, event: events.Event, rank: int = 0) -> None:
        said = messages.Said(job_id="run", rank=rank, event=msgspec.Raw(events.encode(event)))
        self.tell_message(said)

    def tell_message(self, message: messages.Said | messages.RunEnded) -> None:
        self.journal.add(message)

    def kept(self) -> list[events.Event]:
        """The events in the file."""
        return [event for _, event in stored(self.descriptor)]


def stored(descriptor: int) -> list[tuple[int, events.Event]]:
    found = []
    for _, body in journal.read(descriptor):
        message = messages.decode_for_kernel(body)
        if isinstance(message, messages.Said):
            found.append((message.rank, events.decode(bytes(message.event))))
    return found


@pytest.fixture
def book(tmp_path: pathlib.Path) -> Iterator[Book]:
    made = Book(tmp_path / "journal")
    yield made
    os.close(made.descriptor)


def test_what_was_told_is_read_in_order_with_its_numbers(book: Book) -> None:
    told = [
        events.Started(pid=7),
        events.Output(text="one"),
        events.Finished(),
        events.Ended(exit_code=0),
    ]
    for event in told:
        book.tell(event)
    book.tell_message(messages.RunEnded(job_id="run", reason=""))
    assert book.kept() == told
    assert [number for number, _ in journal.read(book.descriptor)] == [1, 2, 3, 4, 5]


def test_samples_of_a_week_are_some_thousand_and_the_last_one_is_there(book: Book) -> None:
    hours = 24 * 7
    steps = 0
    for minute in range(60 * hours):
        book.clock.now_s = 60.0 * minute
        for _ in range(2):
            steps += 1
            book.tell(events.Progress(step=steps, steps=steps))
            book.tell(events.Metrics(step=steps, values={"loss": float(steps)}))
            book.clock.now_s += 0.2
    book.tell(events.Finished())
    kept = book.kept()
    assert steps == 2 * 60 * hours
    assert len(kept) < 10_000
    curve = [event.step for event in kept if isinstance(event, events.Metrics)]
    assert curve == sorted(curve)
    assert curve[-1] == steps
    # No part of the run is without points: no gap is longer than a hundredth of the whole.
    assert max(later - earlier for earlier, later in itertools.pairwise(curve)) < steps / 100


def test_each_of_many_ranks_has_some_hundred_samples_of_an_hour(tmp_path: pathlib.Path) -> None:
    kept = {}
    for world_size in (1, 64):
        book = Book(tmp_path / str(world_size), world_size)
        for step in range(5 * 3600):
            book.clock.now_s = 0.2 * step
            book.tell(events.Metrics(step=step, values={"loss": float(step)}))
        book.tell(events.Finished())
        kept[world_size] = [event.step for event in book.kept() if isinstance(event, events.Metrics)]
        os.close(book.descriptor)
    assert len(kept[1]) > 1500
    assert 256 < len(kept[64]) < 500  # at least as many as a curve of the panel has points
    assert kept[64][-1] == kept[1][-1] == 5 * 3600 - 1


def test_metric_that_was_reported_between_two_written_samples_is_not_lost(book: Book) -> None:
    book.clock.now_s = 100_000.0
    book.tell(events.Metrics(step=1, values={"loss": 1.0}))
    book.tell(events.Metrics(step=2, values={"accuracy": 0.5}))
    book.tell(events.Metrics(step=3, values={"loss": 0.9}))
    book.tell(events.Finished())
    kept = [event for event in book.kept() if isinstance(event, events.Metrics)]
    assert [event.values for event in kept] == [{"loss": 1.0}, {"accuracy": 0.5, "loss": 0.9}]
    assert [kept[1].step_of(name) for name in ("accuracy", "loss")] == [2, 3]


def test_times_of_steps_are_added_up_where_they_are_thinned(book: Book) -> None:
    def line(text: str, samples: int) -> events.SampledLine:
        return events.SampledLine("forward", "", f"line {text}", text, samples)

    whole, told = StepHistory(), 2000
    for number in range(told):
        book.clock.now_s = 50_000.0 + number  # a run that has taken hours writes one of a hundred
        event = events.StepTimes(
            steps=2,
            seconds={"forward": 0.5, "data": 0.25 * (number % 3)},
            evaluations=number % 2,
            compilations=1,
            samples=3,
            lines=[line("a", 1), line(f"b{number % 4}", 2)],
        )
        book.tell(event)
        whole.add(event)
    book.journal.close()
    book.descriptor = os.open(book.path, os.O_RDONLY)
    kept = [event for event in book.kept() if isinstance(event, events.StepTimes)]
    assert 10 < len(kept) < told / 2
    replayed = StepHistory()
    for event in kept:
        replayed.add(event)
    assert replayed.total is not None
    assert whole.total is not None
    assert msgspec.structs.replace(replayed.total, lines=[]) == msgspec.structs.replace(whole.total, lines=[])
    assert sorted(map(str, replayed.total.lines)) == sorted(map(str, whole.total.lines))


def test_output_beyond_the_allowance_is_counted_and_its_end_is_kept(book: Book) -> None:
    line = "x" * 1000
    lines = 40_000
    for number in range(0, lines, 100):
        book.tell(events.Output(text="\n".join(f"{number + offset} {line}" for offset in range(100))))
    book.tell(events.Ended(exit_code=0))
    book.tell(events.Output(text="the last word"))
    book.journal.close()
    book.descriptor = os.open(book.path, os.O_RDONLY)
    assert book.path.stat().st_size < 40 * _MIB
    kept = [event for event in book.kept() if isinstance(event, events.Output)]
    assert sum(event.left_out + event.text.count("\n") + 1 for event in kept) in (lines + 1, lines + 2)
    assert kept[-2].text.endswith(f"{lines - 1} {line}")
    assert kept[-1].text == "the last word"


def test_displays_have_an_allowance_and_a_figure_that_is_redrawn_stays_current(book: Book) -> None:
    figure = "f" * _MIB
    for number in range(100):
        book.tell(events.Display(data={"image/png": f"{number}{figure}"}))
    for number in range(1000):
        book.tell(events.Display(data={"text/plain": str(number)}, display_id="curve", is_update=True))
    book.tell(events.Ended(exit_code=0))
    assert book.path.stat().st_size < 70 * _MIB
    kept = book.kept()
    assert sum(isinstance(event, events.Output) and "64 MiB" in event.text for event in kept) == 1
    assert [event.data for event in kept if isinstance(event, events.Display)][-1] == {"text/plain": "999"}


def test_run_of_a_few_messages_has_no_file() -> None:
    made = Journal("run", 2)
    for event in (events.Started(pid=7), events.Finished(), events.Ended(exit_code=0)):
        made.add(messages.Said(job_id="run", rank=0, event=msgspec.Raw(events.encode(event))))
    assert made.descriptor == -1
    made.close()


@pytest.mark.parametrize("steps", [20, 5000])
def test_run_that_is_detached_later_has_the_journal_that_it_would_have_had(tmp_path: pathlib.Path, steps: int) -> None:
    books = [Book(tmp_path / "kept"), Book(tmp_path / "moved", in_memory=True)]
    for book in books:
        for step in range(2 * steps):
            if step == steps and book.journal.descriptor != book.descriptor:
                book.journal.move_to(book.descriptor)
            book.clock.now_s += 0.2
            book.tell(events.Metrics(step=step, values={"loss": float(step)}, time_s=book.clock.now_s))
            book.tell(events.Output(text=f"step {step}", time_s=book.clock.now_s))
        book.tell(events.Finished(time_s=book.clock.now_s))
    assert books[0].kept() == books[1].kept()
    assert len(books[0].kept()) > steps
    for book in books:
        book.journal.close()


def test_journal_in_memory_is_small_and_keeps_more_once_it_has_a_folder(tmp_path: pathlib.Path) -> None:
    book = Book(tmp_path / "journal", in_memory=True)
    for number in range(60):
        book.tell(events.Output(text=f"{number} {'x' * _MIB}"))
        book.tell(events.Display(data={"image/png": f"{number}{'f' * _MIB}"}))
    assert 20 * _MIB < book.journal.size_bytes < 40 * _MIB
    before = book.journal.size_bytes
    book.journal.move_to(book.descriptor)
    assert book.path.stat().st_size == before
    for number in range(60, 120):
        book.tell(events.Display(data={"image/png": f"{number}{'f' * _MIB}"}))
    book.journal.close()
    assert 60 * _MIB < book.path.stat().st_size - before + 16 * _MIB < 70 * _MIB


def test_late_rank_of_a_long_run_is_named_from_the_journal(tmp_path: pathlib.Path) -> None:
    book = Book(tmp_path / "journal", world_size=2)
    for second in range(1000):
        book.clock.now_s = float(second)
        for number, phases in enumerate((healthy(communication=42.0), healthy(forward=54.0))):
            book.tell(events.Progress(time_s=second, step=second * 20, steps=second * 20), number)
            book.tell(msgspec.structs.replace(step_times(**phases), time_s=float(second)), number)
    book.tell(events.Finished())
    assert [verdict.cause for verdict in diagnose(replay(2, stored(book.descriptor))).verdicts] == ["straggler"]
    book.journal.close()


def test_latest_of_each_kind_tells_the_present_state(book: Book) -> None:
    book.tell(events.Started(pid=7))
    for step in range(1, 1000):
        book.tell(events.Progress(step=step, steps=step))
        book.tell(events.Metrics(step=step, values={"loss" if step % 2 else "accuracy": float(step)}))
    path = book.path.with_name("latest")
    path.write_bytes(book.journal.latest())
    assert path.stat().st_size < 1000
    descriptor = os.open(path, os.O_RDONLY)
    state = replay(1, stored(descriptor))
    os.close(descriptor)
    assert (state.ranks[0].steps, state.ranks[0].metrics) == (999, {"loss": 999.0, "accuracy": 998.0})
    assert state.ranks[0].word == "running"


def test_latest_has_the_time_limit_that_ended_the_run_until_it_is_started_again(book: Book) -> None:
    def is_known() -> bool:
        path = book.path.with_name("latest")
        path.write_bytes(book.journal.latest())
        descriptor = os.open(path, os.O_RDONLY)
        state = replay(1, stored(descriptor))
        os.close(descriptor)
        return state.early_end != ""

    for event in (events.Started(pid=7), events.TimeLimitReached(limit=1e9), events.Finished()):
        book.tell(event)
    assert is_known()
    book.tell(events.Started(pid=8))
    assert not is_known()


def test_full_disk_loses_samples_and_says_so_and_loses_no_end(book: Book) -> None:
    book.tell(events.Started(pid=7))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (book.journal.size_bytes + 10, hard))  # the system refuses what is longer
    try:
        for number in range(5):
            book.tell(events.Output(text=f"line {number}"))
        book.tell(events.Failed(kind="ValueError", message="x", traceback=""))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [type(event) for event in book.kept()] == [events.Started]
    book.tell(events.Ended(exit_code=1))
    started, failed, notice, ended = book.kept()
    assert (type(started), type(failed), type(ended)) == (events.Started, events.Failed, events.Ended)
    assert isinstance(notice, events.Output)
    assert notice.text == "[there was no room: 5 messages of this run are missing here]"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[tuple[int, bytes]]]:
    """A journal's bytes and its frames."""
    book = Book(tmp_path_factory.mktemp("journal") / "journal")
    book.tell(events.Started(pid=7))
    for number in range(6):
        book.tell(events.Output(text=f"line {number}"))
    book.tell_message(messages.RunEnded(job_id="run", reason=""))
    frames = list(journal.read(book.descriptor))
    os.close(book.descriptor)
    return book.path.read_bytes(), frames


def read_bytes(path: pathlib.Path, data: bytes) -> list[tuple[int, bytes]]:
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return list(journal.read(descriptor))
    finally:
        os.close(descriptor)


def test_journal_that_is_cut_at_any_byte_is_read_up_to_there(
    whole: tuple[bytes, list[tuple[int, bytes]]], tmp_path: pathlib.Path
) -> None:
    data, frames = whole
    ends = [0]
    for number, body in frames:
        ends.append(ends[-1] + len(journal.frame(number, body)))
    for cut in range(len(data) + 1):
        count = sum(end <= cut for end in ends) - 1
        assert read_bytes(tmp_path / "cut", data[:cut]) == frames[:count], cut


@hypothesis.given(strategies.data())
@hypothesis.settings(
    max_examples=200, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], deadline=None
)
def test_damage_ends_the_reading_and_what_was_read_is_right(
    whole: tuple[bytes, list[tuple[int, bytes]]], tmp_path: pathlib.Path, data: strategies.DataObject
) -> None:
    written, frames = whole
    at = data.draw(strategies.integers(0, len(written) - 1))
    flipped = data.draw(strategies.integers(1, 255))
    damaged = written[:at] + bytes([written[at] ^ flipped]) + written[at + 1 :]
    found = read_bytes(tmp_path / "damaged", damaged)
    assert found == frames[: len(found)]
    assert len(found) < len(frames)


def test_garbage_is_no_journal(tmp_path: pathlib.Path) -> None:
    assert read_bytes(tmp_path / "garbage", random.Random(1).randbytes(3 * _MIB)) == []
