"""Lines from a growing log: whole, in order, complete, however the writes were cut; and of too many the last ones."""

from __future__ import annotations

import os
import pathlib

from hypothesis import given
from hypothesis import strategies as st

from notebook_accel.launching.agent.output import Allowance, LogTail, open_log
from notebook_accel.protocol import events


class Log:
    """A log in memory, the tail that follows it, and what that has said."""

    def __init__(self, world_size: int = 1, descriptor: int | None = None) -> None:
        self.descriptor = open_log("", 0)[0] if descriptor is None else descriptor
        self.said: list[events.Output] = []
        self.tail = LogTail(self.descriptor, Allowance(world_size), self.said.append)
        self.now_s = 0.0

    def write(self, data: bytes, after_s: float = 0.05) -> None:
        os.write(self.descriptor, data)
        self.now_s += after_s
        self.tail.read(self.now_s, self.tail.size_bytes)

    def finish(self) -> list[str]:
        """Every line that was said."""
        self.tail.finish()
        self.tail.close()
        return self.lines

    @property
    def lines(self) -> list[str]:
        return [line for event in self.said for line in event.text.split("\n")]

    @property
    def left_out(self) -> int:
        return sum(event.left_out for event in self.said)


def read_lines(chunks: list[bytes]) -> list[str]:
    log = Log()
    for chunk in chunks:
        log.write(chunk)
    return log.finish()


def test_first_lines_are_said_also_of_a_flood_that_nobody_saw_begin() -> None:
    count = 300_000
    log = Log()
    os.write(log.descriptor, "".join(f"line {number} {'x' * 50}\n" for number in range(count)).encode())
    numbers = [int(line.split()[1]) for line in log.finish()]
    assert numbers[0] == 0 and numbers[-1] == count - 1
    assert numbers == sorted(numbers)
    assert len(numbers) + log.left_out == count and log.left_out > 0


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)), st.data())
def test_lines_survive_any_cut(lines: list[str], data: st.DataObject) -> None:
    whole = "".join(line + "\n" for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert read_lines([chunk for chunk in chunks if chunk]) == lines


@given(st.data())
def test_carriage_return_starts_the_line_over_however_it_is_cut(data: st.DataObject) -> None:
    whole = b"10%\r50%\r100%\nnext\r\n\xff\xfe ok\nwithout an end\r"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    chunks = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    read = read_lines([chunk for chunk in chunks if chunk])
    assert read == ["100%", "next", "\ufffd\ufffd ok", "without an end"]


def test_endless_line_is_cut_into_pieces() -> None:
    log = Log()
    for _ in range(40):
        log.write(b"x" * 60_000)
    assert len(log.said) == 2  # pieces of a MiB, and the rest is waiting
    assert sum(map(len, log.finish())) == 40 * 60_000
    assert log.left_out == 0


def flood(log: Log, count: int, *, step_s: float = 0.05) -> None:
    """Numbered lines, 100,000 at each look, as ranks write them."""
    for start in range(0, count, 100_000):
        log.write("".join(f"line {n:09}\n" for n in range(start, start + 100_000)).encode(), step_s)


def numbers(lines: list[str]) -> list[int]:
    return [int(line.removeprefix("line ")) for line in lines]


def test_of_a_flood_the_first_and_the_last_lines_are_said_and_the_others_counted() -> None:
    log, count = Log(), 1_000_000
    flood(log, count)
    gaps = [event for event in log.said if event.left_out]
    assert (
        1 <= len(gaps) <= count / 100_000 * 0.05 * 16 + 1
    )  # the smallest piece after a gap takes 1/16 s to be allowed
    said = numbers(log.finish())
    assert said[:200_000] == list(range(200_000))
    assert said[-4000:] == list(range(count - 4000, count))
    assert said == sorted(said)
    assert len(said) + log.left_out == count
    assert len(said) < 600_000


def test_what_is_said_after_a_gap_begins_with_a_whole_line() -> None:
    log = Log(world_size=50)
    flood(log, 400_000, step_s=2.0)
    gaps = [event for event in log.said if event.left_out]
    assert len(gaps) >= 3
    for event in gaps:
        assert all(len(line) == len("line 000000000") for line in event.text.split("\n"))
    assert len(numbers(log.finish())) + log.left_out == 400_000


def test_calm_after_a_flood_lets_everything_through_again() -> None:
    log = Log()
    flood(log, 1_000_000)
    log.write(b"", after_s=60.0)
    before = log.left_out
    for number in range(20):
        log.write(f"calm {number}\n".encode())
    assert log.lines[-20:] == [f"calm {number}" for number in range(20)]
    assert log.left_out == before
    log.tail.close()


def test_log_is_read_as_far_as_is_asked_for() -> None:
    log = Log()
    os.write(log.descriptor, b"before\nafter\n")
    assert log.tail.grown_bytes is not None
    log.tail.read(1.0, len(b"before\n"))
    assert (log.lines, log.tail.grown_bytes is None) == (["before"], False)
    log.tail.read(1.0, 3)  # which was said already
    log.tail.read(2.0, log.tail.size_bytes)
    assert (log.lines, log.tail.grown_bytes is None) == (["before", "after"], True)
    log.tail.close()


def test_line_longer_than_what_may_be_said_is_left_out_and_counted() -> None:
    log = Log(world_size=100)
    log.write(b"first\n" + b"x" * 30_000_000 + b"\nlast\n")
    assert log.finish()[-1] == "last"
    assert log.left_out >= 1
    assert sum(map(len, log.lines)) < 1 << 20


def test_log_that_somebody_empties_is_followed_on() -> None:
    log = Log()
    log.write(b"before, and longer\n")
    os.ftruncate(log.descriptor, 0)
    log.write(b"after\n")
    assert log.finish() == ["before, and longer", "after"]


def test_rank_that_is_started_once_more_goes_on_in_its_log() -> None:
    log = Log()
    log.write(b"of the first one\n")
    again = Log(descriptor=os.dup(log.descriptor))
    again.write(b"of the second one\n")
    assert again.finish() == ["of the second one"]
    log.tail.close()


def test_log_is_the_users_own_file(tmp_path: pathlib.Path) -> None:
    descriptor, complaint = open_log(str(tmp_path), 3)
    os.write(descriptor, b"hello\n")
    os.close(descriptor)
    [file] = tmp_path.iterdir()
    assert (file.name, file.read_text(), file.stat().st_mode & 0o777, complaint) == ("rank_3.log", "hello\n", 0o600, "")


def test_without_a_file_the_log_is_in_memory(tmp_path: pathlib.Path) -> None:
    (tmp_path / "rank_0.log").symlink_to(tmp_path / "elsewhere")  # which somebody else has put there
    for folder in (tmp_path / "nowhere", tmp_path):
        descriptor, complaint = open_log(str(folder), 0)
        assert "no log file" in complaint
        os.write(descriptor, b"kept all the same")
        assert os.pread(descriptor, 100, 0) == b"kept all the same"
        os.close(descriptor)
    assert not (tmp_path / "elsewhere").exists()


def test_log_that_cannot_be_read_is_said_so_once_and_raises_nothing(tmp_path: pathlib.Path) -> None:
    log = Log(descriptor=os.open(tmp_path, os.O_RDONLY | os.O_CLOEXEC))  # the system refuses to read a folder
    log.tail.finish()
    log.tail.read(1.0, 2 * log.tail.size_bytes)
    assert log.tail.grown_bytes is None
    assert log.finish() == ["[this rank's log can't be read (Is a directory): what it prints now may not be shown]"]
