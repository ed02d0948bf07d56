"""Small pieces of HTML, and how numbers are written for people. Everything that becomes HTML here is escaped."""

from __future__ import annotations

import html

from notebook_accel.formatting import format_size

__all__ = [
    "UNKNOWN",
    "badge",
    "bar",
    "counted",
    "faint",
    "in_digits",
    "rate",
    "scrolled",
    "shortened",
    "sizes_in_words",
]

UNKNOWN = "\N{EN DASH}"
_LARGEST_COUNT = 1e12


def badge(word: str) -> str:
    """A word in a frame, in the colour of the state of that name."""
    return f'<span class="nba-badge nba-{html.escape(word)}">{html.escape(word)}</span>'


def faint(text: str) -> str:
    """Text that is less important."""
    return f'<span class="nba-faint">{html.escape(text)}</span>'


def bar(value: float, total: float, label: str, kind: str = "") -> str:
    """A bar that is filled as far as ``value`` is of ``total``; ``label`` is its attributes."""
    share = min(max(value / total, 0.0), 1.0)
    return (
        f'<div class="nba-bar {kind}" {label} aria-valuemin="0" aria-valuenow="{value}" aria-valuemax="{total}">'
        f'<div style="width:{share:.1%}"></div></div>'
    )


def scrolled(body: str) -> str:
    """Something that may be long, in a box that scrolls, with its end in view."""
    return f'<div class="nba-scrollback" tabindex="0">{body}</div>'


def counted(number: int, noun: str) -> str:
    """``1 line``, ``2,000 lines``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def shortened(text: str, characters: int) -> str:
    """A text that may be cut off at its end."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def rate(steps_per_s: float | None) -> str:
    """Steps a second, with three digits or so."""
    if steps_per_s is None:
        return UNKNOWN
    if steps_per_s >= 1:
        return f"{steps_per_s:,.0f}" if steps_per_s >= 100 else f"{steps_per_s:.1f}"
    return f"{steps_per_s:.2g}"


def in_digits(value: float | None) -> str:
    """A metric. Counts are exact, and no large number that people can read gets an exponent."""
    if value is None:
        return UNKNOWN
    if value.is_integer() and abs(value) < _LARGEST_COUNT:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.4g}"


def sizes_in_words(used_bytes: int, total_bytes: int) -> list[str]:
    """Both sizes, with the unit once if it is the same; the total only if it is known."""
    used, total = format_size(used_bytes), format_size(total_bytes)
    if not total_bytes:
        return [used]
    number, _, unit = used.partition(" ")
    return [number if total.endswith(unit) else used, total]
