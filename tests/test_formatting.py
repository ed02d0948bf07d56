"""Text for people: sizes, durations, sanitized lines and colours."""

from __future__ import annotations

import re

import pytest

from notebook_accel.formatting import (
    OutputWindow,
    coloured,
    first_line,
    format_clock,
    format_duration,
    format_size,
    json_text,
    plain_text,
)


@pytest.mark.parametrize(("size_bytes", "words"), [
    (0, "0 KiB"), (3 << 10, "3 KiB"), (1 << 20, "1.0 MiB"), (240 << 20, "240 MiB"), (3 << 29, "1.5 GiB"),
    (80 << 30, "80 GiB"),
])  # fmt: skip
def test_sizes_in_words(size_bytes: int, words: str) -> None:
    assert format_size(size_bytes) == words


@pytest.mark.parametrize(("seconds", "words"), [
    (0.041, "0.04 s"), (3.21, "3.2 s"), (9.99, "10.0 s"), (10.0, "00:10"), (125.9, "02:05"), (3725.0, "1:02:05"),
])  # fmt: skip
def test_how_long_something_took(seconds: float, words: str) -> None:
    assert format_duration(seconds) == words


@pytest.mark.parametrize(("text", "line"), [
    ("", ""), ("one\ntwo", "one"), ("  \none:\n\ttwo\nthree", "one: two"), ("one:", "one:"), ("one:\n\nthree", "one:"),
])  # fmt: skip
def test_first_line_of_a_message_says_something(text: str, line: str) -> None:
    assert first_line(text) == line


@pytest.mark.parametrize(("seconds", "words"), [(0.9, "00:00"), (59.9, "00:59"), (3600.0, "1:00:00")])
def test_minutes_and_hours(seconds: float, words: str) -> None:
    assert format_clock(seconds) == words


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("\x1b[1;31mred\x1b[0m plain", "red plain"),
        ("\x1b]0;title\x07text", "text"),
        ("10%\r50%\r100%", "100%"),
        ("windows line\r", "windows line"),
        ("a\tb", "a\tb"),
        ("|\b/\b-\bdone", "done"),
        ("loading 10%\b\b\b20%\b\b\b3", "loading 30%"),
        ("\b\bx\b", "x"),
        ("\x1b[1m10\x1b[0m\b\b20", "20"),
        ("old\rnew\b\b\b\b\bN", "New"),
        ("bell\x07", "bell\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_plain_text_is_what_a_terminal_would_leave(line: str, text: str) -> None:
    assert plain_text(line) == text


_TEXT = """RankFailedError: rank 1 of 2 failed at In[3], line 5: ValueError: no images
Traceback of rank 1:
Traceback (most recent call last):
  File "In[3]", line 5, in load
    raise ValueError("no images")
    ^^^^^
  | TypeError: in a group
json.decoder.JSONDecodeError
Last output of rank 1:
  reading: all
Fix: look again"""


def marked(text: str) -> list[str]:
    """Return the coloured parts, each after its colour's number."""
    return ["".join(found) for found in re.findall(r"\x1b\[([1-9]\d*)m(.*?)\x1b\[0m", text)]


def test_names_places_and_headings_are_marked_and_the_text_stays() -> None:
    shown = coloured(_TEXT)
    assert re.sub(r"\x1b\[\d+m", "", shown) == _TEXT
    names = ["31RankFailedError", "31TypeError", "31json.decoder.JSONDecodeError"]
    places = ['32"In[3]"', "325", "36load", "31    ^^^^^"]
    headings = ["1Traceback of rank 1:", "1Last output of rank 1:", "1Fix:"]
    assert sorted(marked(shown)) == sorted([*names, *places, *headings])


def test_json_has_null_for_numbers_that_json_lacks() -> None:
    numbers = [float("nan"), float("inf"), -float("inf"), 1e308, 0.1]
    assert json_text({"loss": numbers}) == '{"loss": [null, null, null, 1e+308, 0.1]}'
    assert json_text({"NaN": {1}}, indent=1, default=list) == '{\n "NaN": [\n  1\n ]\n}'


def test_window_keeps_the_first_and_the_last_lines_around_one_gap() -> None:
    window = OutputWindow[int](2, 3)
    assert [*window.add([0]), *window.add([1, 2, 3])] == [0, 1]
    assert (list(window.tail), window.gap()) == ([2, 3], [])
    assert window.add([4, 5]) == []
    assert (list(window.tail), window.gap("the log")) == (
        [3, 4, 5],
        ["[1 line left out here; the whole output is in the log]"],
    )
    window.pass_over(0)
    window.pass_over(10)
    window.add([6])
    assert (list(window.tail), window.gap()) == ([6], ["[14 lines left out here]"])
    window = OutputWindow[int](2, 3)
    window.pass_over(1)
    assert window.add([7]) == []  # the first lines are those before the gap
