"""One line for what several ranks print alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notebook_accel.formatting import rank_spans
from notebook_accel.launching.views.rank_lines import AlikeLines, RankLine, margin


class LineRecorder:
    """Records the lines that ``AlikeLines`` settles."""

    def __init__(self, world_size: int = 8, moment_s: float = 1.0) -> None:
        self.settled: list[RankLine] = []
        self.alike = AlikeLines(world_size, moment_s, self.settled.append)

    def add(self, rank: int, *texts: str, now_s: float = 0.0) -> None:
        self.alike.add(rank, texts, now_s)

    @property
    def lines(self) -> list[str]:
        return [f"{','.join(rank_spans(line.ranks))} {line.text}" for line in [*self.settled, *self.alike.unsettled]]


def test_a_warning_of_all_ranks_stands_once_above_what_each_says_by_itself() -> None:
    shown = LineRecorder()
    for rank in range(8):
        shown.add(rank, "a.py:1: UserWarning: old", "  warn()", f"rank {rank} goes on")
    assert shown.lines[:2] == ["0-7 a.py:1: UserWarning: old", "0-7   warn()"]
    assert shown.lines[2:] == [f"{rank} rank {rank} goes on" for rank in range(8)]


def test_some_ranks_and_a_late_one() -> None:
    shown = LineRecorder()
    for rank in (5, 1, 0, 2):
        shown.add(rank, "same", now_s=0.1 * rank)
    shown.add(7, "same", now_s=2.0)
    assert shown.lines == ["0-2,5 same", "7 same"]


def test_what_one_rank_repeats_is_shown_as_often_as_it_says_it() -> None:
    shown = LineRecorder()
    shown.add(0, "a", "a", "a")
    shown.add(1, "a", "b", "a")
    assert shown.lines == ["0-1 a", "0 a", "0 a", "1 b", "1 a"]


def test_lines_are_not_reordered_by_one_that_is_alike() -> None:
    shown = LineRecorder()
    shown.add(0, "warning", "0 goes on")
    shown.add(1, "1 begins", "warning")
    assert shown.lines == ["0 warning", "0 0 goes on", "1 1 begins", "1 warning"]


def test_line_is_settled_after_a_moment_or_when_all_ranks_have_printed_it() -> None:
    shown = LineRecorder(world_size=2, moment_s=0.2)
    shown.add(0, "mine", "ours", now_s=1.0)
    shown.add(1, "ours", now_s=1.1)
    assert shown.settled == []  # in order
    shown.alike.settle(1.19)
    assert shown.settled == []
    shown.alike.settle(1.2)
    assert [line.text for line in shown.settled] == ["mine", "ours"] and not shown.alike.unsettled
    for rank in range(2):
        shown.add(rank, "at once", now_s=5.0)
    assert shown.settled[-1].ranks == {0, 1}


_PRINTED = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.lists(st.sampled_from(["a", "b", "c", ""]), max_size=6),
        st.sampled_from([0.0, 0.01, 0.15, 0.3, 1.5]),
    ),
    max_size=40,
)


@given(_PRINTED, st.booleans())
def test_no_line_is_lost_or_stands_elsewhere_among_its_ranks_lines(
    printed: list[tuple[int, list[str], float]], are_settled: bool
) -> None:
    shown, now_s = LineRecorder(world_size=4), 0.0
    for rank, texts, after_s in printed:
        now_s += after_s
        shown.add(rank, *texts, now_s=now_s)
        if are_settled:
            shown.alike.settle(now_s)
    lines = [*shown.settled, *shown.alike.unsettled]
    for rank in range(4):
        said = [text for number, texts, _ in printed if number == rank for text in texts]
        assert [line.text for line in lines if rank in line.ranks] == said


@given(_PRINTED)
def test_what_no_other_rank_says_stays_in_order_of_arrival(printed: list[tuple[int, list[str], float]]) -> None:
    shown, now_s, own = LineRecorder(world_size=4, moment_s=5.0), 0.0, []
    for number, (rank, texts, after_s) in enumerate(printed):
        now_s += after_s
        own.append(f"only now {number}")
        shown.add(rank, *texts, own[-1], now_s=now_s)
    lines = [*shown.settled, *shown.alike.unsettled]
    assert [line.text for line in lines if line.text.startswith("only now")] == own


@pytest.mark.parametrize("at_once", [1, 250, 5_000])
def test_flood_is_bounded(at_once: int) -> None:
    """The slowest kind of flood: every other line of each rank is alike, so that each could join many."""
    shown, longest, count = LineRecorder(), 0, 40_000
    for start in range(0, count // 8, at_once):
        for rank in range(8):
            shown.add(rank, *(f"{rank} {n}" if n % 2 else "step" for n in range(start, start + at_once)), now_s=start)
            longest = max(longest, len(shown.alike.unsettled))
        shown.settled.clear()
    assert longest <= 500


def test_margin_is_as_wide_as_that_of_all_ranks() -> None:
    margins = [margin(ranks, 8) for ranks in ({3}, range(8), {0, 1, 2, 5})]
    assert margins == ["  3 │ ", "0-7 │ ", "0-2,5 │ "]
    assert [margin({0}, 1), margin({1}, 4, first=2)] == ["0 │ ", "  3 │ "]
    assert margin(range(0, 64, 2), 64) == "0,2,4,6,8,+27 │ "
    assert margin({0, 1}, 4, first=2, template="[${rank} ${local_rank}] ") == "[2-3 0-1] "
