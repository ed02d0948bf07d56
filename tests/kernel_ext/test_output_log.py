"""What is kept of what ranks write."""

from __future__ import annotations

import pytest

from kernel_ext.output_log import OutputLog
from notebook_accel.protocol import events


def test_much_output_keeps_its_beginning_and_its_end() -> None:
    log = OutputLog(2)
    for number in range(5000):
        log.add(0, [str(number)], 0.0)
    assert log.count == 5000
    assert log.head[0].text == "0"
    assert [line.text for line in log.last(2)] == ["4998", "4999"]
    assert len(log.head) + len(log.tail) + log.left_out == 5000
    assert log.left_out > 0
    # No line from before the gap stands next to one from after it.
    assert [line.text for line in log.last(10_000)] == [line.text for line in log.tail]


def test_last_lines_reach_from_the_end_into_the_beginning_when_nothing_was_left_out() -> None:
    log = OutputLog(2)
    for number in range(250):
        log.add(0, [str(number)], 0.0)
    assert [line.text for line in log.last(100)] == [str(number) for number in range(150, 250)]


@pytest.mark.parametrize(
    ("line", "is_error"),
    [
        ("Traceback (most recent call last):", True),
        ("ValueError: boom", True),
        ("torch.OutOfMemoryError: CUDA out of memory", True),
        ("2026-11-22 [ERROR] disk is full", True),
        ("cc1plus: fatal: no such file", True),
        ("epoch 1: error 0.25", False),
        ("validation errors: 3", False),
        ("KeyError", True),
    ],
)
def test_lines_that_look_like_errors(line: str, is_error: bool) -> None:
    log = OutputLog(2)
    log.add(0, [line], 0.0)
    assert (log.error_count == 1) == is_error


def test_errors_stay_when_much_is_written_after_them() -> None:
    log = OutputLog(2)
    log.add(1, ["ValueError: boom"], 0.0)
    for number in range(5000):
        log.add(0, [str(number)], 0.0)
    assert [(line.ranks, line.text) for line in log.errors] == [({1}, "ValueError: boom")]
    assert [(line.ranks, line.text) for line in log.of_rank(1)] == [({1}, "ValueError: boom")]
    assert len(log.of_rank(0)) < 5000
    for _ in range(5000):
        log.add(0, ["ERROR again"], 0.0)
    assert len(log.errors) < 100
    assert log.error_count == 5001


def test_a_ranks_own_lines_have_no_hidden_gap() -> None:
    log = OutputLog(2)
    log.add(0, ["before"], 0.0)
    log.add(1, ["another rank's"], 0.0)
    log.pass_over(0, 10)
    log.add(0, ["after"], 0.0)
    assert [line.text for line in log.of_rank(0)] == ["after"]
    assert [line.text for line in log.of_rank(1)] == ["another rank's"]


def test_output_is_kept_by_rank_in_order_of_arrival() -> None:
    log = OutputLog(2)
    log.take(1, events.Output(text="a\nb"))
    log.take(0, events.Output(text="c"))
    assert [(line.ranks, line.text) for line in log.last(10)] == [({1}, "a"), ({1}, "b"), ({0}, "c")]


def test_a_line_of_a_megabyte_is_clipped() -> None:
    log = OutputLog(1)
    log.take(0, events.Output(text="x" * 1_000_000))
    (line,) = log.last(1)
    assert line.text.startswith("xxxx")
    assert line.text.endswith("… and 998,000 more characters")


def test_lines_that_are_in_a_log_only_make_one_gap() -> None:
    log = OutputLog(1)
    for number in range(300):
        log.take(0, events.Output(text=str(number)))
    log.take(0, events.Output(text="300\n301", left_out=1000))
    log.take(0, events.Output(text="302", left_out=50))
    log.take(0, events.Output(text="303"))
    assert [line.text for line in log.head] == [str(number) for number in range(200)]
    assert [line.text for line in log.tail] == ["302", "303"]
    assert (log.count, log.left_out) == (1354, 1152)
    assert [line.text for line in log.last(3)] == ["302", "303"]


def test_head_does_not_go_on_after_a_gap() -> None:
    log = OutputLog(1)
    log.take(0, events.Output(text="first"))
    log.take(0, events.Output(text="last", left_out=10))
    assert [line.text for line in log.head] == ["first"]
    assert [line.text for line in log.tail] == ["last"]
    assert log.left_out == 10
