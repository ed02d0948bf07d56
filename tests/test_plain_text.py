"""Text of a rank, made harmless."""

from __future__ import annotations

import pytest

from notebook_accel.plain_text import plain_text


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("\x1b[1;31mred\x1b[0m plain", "red plain"),
        ("\x1b]0;title\x07text", "text"),
        ("10%\r50%\r100%", "100%"),
        ("windows line\r", "windows line"),
        ("a\tb", "a\tb"),
        ("bell\x07", "bell\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_plain_text_is_what_a_terminal_would_leave(line: str, text: str) -> None:
    assert plain_text(line) == text
