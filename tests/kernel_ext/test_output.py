"""Tests of the output that a panel keeps, and of how it shows output, stacks and logs."""

from __future__ import annotations

import pytest

from kernel_ext.output import Choice, OutputLog, errors_html, log_html, output_html, stacks_html
from notebook_accel.protocol import events
from tests.kernel_ext.fake_runs import Document


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
    assert "boom" in Document(output_html(log, Choice(rank=1))).text
    assert "boom" not in Document(output_html(log)).text
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


def test_lines_that_are_in_a_log_only_make_one_gap() -> None:
    log = OutputLog(1)
    for number in range(300):
        log.take(0, events.Output(text=str(number)))
    log.take(0, events.Output(text="300\n301", left_out=1000))
    log.take(0, events.Output(text="302", left_out=50))
    log.take(0, events.Output(text="303"))
    assert [line.text for line in log.head] == [str(number) for number in range(200)]  # which doesn't go on after a gap
    assert [line.text for line in log.tail] == ["302", "303"]
    assert (log.count, log.left_out) == (1354, 1152)
    assert [line.text for line in log.last(3)] == ["302", "303"]


def test_live_output_shows_the_last_lines_with_their_ranks() -> None:
    output = OutputLog(12)
    for number in range(150):
        output.take(number % 2 * 11, events.Output(text=f"line {number}"))
    text = Document(output_html(output)).text
    assert "50 earlier lines" in text
    assert "line 49\n" not in text
    assert text.endswith("   0 │ line 148\n  11 │ line 149")


def test_live_output_says_when_there_is_none_and_has_its_template_before_each_line() -> None:
    output = OutputLog(2, lambda ranks: f"[of {sorted(ranks)}] ")
    assert Document(output_html(output)).text == "no output yet"
    output.take(1, events.Output(text="hello"))
    assert "[of [1]] hello" in Document(output_html(output)).text
    output.take(1, events.Output(text="x" * 1_000_000))
    assert Document(output_html(output)).text.endswith("xxx … and 998,000 more characters")


def test_search_is_for_text_and_not_for_a_pattern_and_marks_escape() -> None:
    output = OutputLog(2)
    output.take(0, events.Output(text="a.b <b>\naxb <b>"))
    found = Document(output_html(output, Choice(search="A.B <")))
    assert "1 of 2 lines" in found.text
    assert "a.b <b>" in found.text
    assert "axb" not in found.text
    assert [tag for tag, _ in found.elements if tag in ("mark", "b")] == ["mark"]


def test_errors_are_above_with_their_count() -> None:
    output = OutputLog(2)
    assert errors_html(output) == ""
    output.take(0, events.Output(text="\n".join(f"ERROR <{number}>" for number in range(10))))
    shown = Document(errors_html(output))
    assert "10 lines that look like errors, the last 3" in shown.text
    assert "0 │ ERROR <9>" in shown.text
    assert "<6>" not in shown.text
    assert errors_html(output, Choice(rank=1)) == ""


def test_stacks_are_open_where_they_are_few_and_those_of_the_chosen_rank() -> None:
    def texts(count: int) -> list[str]:
        return [f"rank {rank} (pid 1), innermost call first:\n  <{rank}>" for rank in range(count)]

    few, many = (Document(stacks_html(texts(count), "as of 00:42", Choice())) for count in (2, 64))
    assert ["open" in details for tag, details in few.elements if tag == "details"] == [True, True]
    assert [details for tag, details in many.elements if tag == "details" and "open" in details] == []
    assert "<63>" in many.text
    chosen = Document(stacks_html(texts(64), "as of 00:42", Choice(rank=5)))
    assert "<5>" in chosen.text
    assert "<6>" not in chosen.text


def test_log_of_a_rank_is_plain_text_in_which_one_can_search() -> None:
    shown = Document(log_html(["/logs/rank_0.log"], "\x1b[31m<red>\x1b[0m\nother", Choice(rank=0, search="red")))
    assert shown.text == "/logs/rank_0.log\n<red>"
    assert "/logs/rank_0.log" in Document(log_html(["/logs/rank_0.log"], "", Choice())).text
    assert "no log files" in Document(log_html([], "", Choice(rank=0))).text


def test_line_that_other_ranks_print_too_is_shown_at_once_and_names_them_as_they_come() -> None:
    output = OutputLog(8)
    shown = []
    for rank in (0, 1, 2, 5):
        output.take(rank, events.Output(time_s=10.0 + rank / 10, text="ERROR of several"))
        shown.append(Document(output_html(output)).text)
    assert shown == [f"{ranks:>3} │ ERROR of several" for ranks in ("0", "0-1", "0-2", "0-2,5")]
    assert "1 line that looks like an error" in Document(errors_html(output, Choice(rank=5))).text
    assert errors_html(output, Choice(rank=3)) == ""
    assert Document(output_html(output, Choice(rank=2))).text == "0-2,5 │ ERROR of several"
    assert "1 of 1 line" in Document(output_html(output, Choice(search="several"))).text
    output.take(6, events.Output(time_s=20.0, text="ERROR of several"))  # much later
    assert Document(output_html(output)).text == "0-2,5 │ ERROR of several\n  6 │ ERROR of several"
