"""What is shown of the ranks' output, their stacks and their logs. Everything that a rank said is escaped."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Iterable, Sequence
from typing import Literal

from kernel_ext.markup import counted, faint, scrolled
from kernel_ext.output_log import OutputLog
from notebook_accel.formatting import plain_lines
from notebook_accel.launching.views.rank_lines import RankLine

__all__ = ["Choice", "errors_html", "log_html", "output_html", "output_lines", "stacks_html", "traceback_html",
           "whole_output_html"]  # fmt: skip

_LIVE_LINES = 100
_MOST_FOUND = 200
_ERRORS_IN_VIEW = 3
_MOST_UNFOLDED_LINES = 30
_OPEN_LINES = 12  # of output that is folded
_TRACEBACK_LINES = 200
_MOST_OPEN_STACKS = 4


@dataclasses.dataclass(frozen=True)
class Choice:
    """What the reader wants to see of it.

    Attributes:
        view: Which of the three.
        rank: The rank whose it is, ``None`` for all.
        search: Only lines with this text, whatever its case; empty for all lines.
    """

    view: Literal["output", "stacks", "log"] = "output"
    rank: int | None = None
    search: str = ""

    def finds(self, text: str) -> bool:
        """Return whether a line has what is searched for."""
        return self.search.lower() in text.lower()


def output_html(output: OutputLog, choice: Choice = Choice()) -> str:
    """The last lines of output, the newest last."""
    if choice.search:
        return _found_html(output, choice)
    lines = output.last(_LIVE_LINES) if choice.rank is None else output.of_rank(choice.rank)[-_LIVE_LINES:]
    earlier = output.count - len(lines) if choice.rank is None else 0
    note = f"{faint(counted(earlier, 'earlier line'))}\n" if earlier else ""
    body = _lines_html(lines, output) if lines else faint("no output yet")
    return f'<pre class="nba-output" aria-label="Output">{note}{body}</pre>'


def _found_html(output: OutputLog, choice: Choice) -> str:
    kept = [*output.head, *output.tail] if choice.rank is None else output.of_rank(choice.rank)
    found = [line for line in kept if choice.finds(line.text)]
    of = f"{len(found):,} of {counted(len(kept), 'line')}" + (" that are kept here" if output.left_out else "")
    lines = "\n".join(
        f"{faint(output.prefix(line.ranks))}{_marked(line.text, choice.search)}" for line in found[-_MOST_FOUND:]
    )
    return f'<pre class="nba-output" aria-label="Output found">{faint(of)}\n{lines}</pre>'


def errors_html(output: OutputLog, choice: Choice = Choice()) -> str:
    """The last lines that look like errors, for above all others; empty if there are none."""
    errors = [line for line in output.errors if choice.rank is None or choice.rank in line.ranks]
    if not errors:
        return ""
    count = output.error_count if choice.rank is None else len(errors)
    head = "1 line that looks like an error" if count == 1 else f"{count:,} lines that look like errors"
    shown = errors[-_ERRORS_IN_VIEW:]
    last = f", the last {len(shown)}" if count > len(shown) else ""
    return (
        f'<div class="nba-errors" role="group" aria-label="Errors"><b>{head}{last}</b>'
        f'<pre class="nba-output">{_lines_html(shown, output)}</pre></div>'
    )


def stacks_html(stacks: Sequence[str], said: str, choice: Choice) -> str:
    """Where each rank stands: its first line, with the others folded below it where ranks are many.

    Args:
        stacks: A text for each rank.
        said: What to say of them all, such as when they were asked.
        choice: What the reader wants.
    """
    chosen = [text for rank, text in enumerate(stacks) if choice.rank in (None, rank) and choice.finds(text)]
    is_open = " open" if len(chosen) <= _MOST_OPEN_STACKS else ""
    shown = []
    for text in chosen:
        first, _, rest = text.partition("\n")
        body = f'<pre class="nba-output">{html.escape(rest)}</pre>' if rest else ""
        tag = f"<details{is_open}><summary>{html.escape(first)}</summary>{body}</details>"
        shown.append(tag if rest else f'<p class="nba-said">{html.escape(first)}</p>')
    return f'<p class="nba-said nba-faint" role="status">{html.escape(said)}</p>{"".join(shown)}'


def log_html(files: Sequence[str], text: str, choice: Choice) -> str:
    """The files of all ranks, or the end of one rank's.

    Args:
        files: The paths.
        text: The last lines of the chosen rank's file, or why there are none.
        choice: What the reader wants.
    """
    if choice.rank is None or choice.rank >= len(files):
        rows = "\n".join(f"{faint(f'rank {rank}')}  {html.escape(path)}" for rank, path in enumerate(files))
        return f'<pre class="nba-output" aria-label="Log files">{rows or faint("this run has no log files")}</pre>'
    lines = [line for line in plain_lines(text) if choice.finds(line)]
    body = "\n".join(_marked(line, choice.search) for line in lines)
    return f'<pre class="nba-output" aria-label="Log">{faint(files[choice.rank])}\n{body}</pre>'


def whole_output_html(output: OutputLog, log_folder: str) -> str:
    """The kept output. Of much, the last lines are in view, and the ones before them folded away."""
    if not output.count:
        return f'<pre class="nba-output" aria-label="Output">{faint("no output")}</pre>'
    last = output.last(_MOST_UNFOLDED_LINES if output.count <= _MOST_UNFOLDED_LINES else _OPEN_LINES)
    shown = f'<pre class="nba-output" aria-label="Output">{_lines_html(last, output)}</pre>'
    earlier = output.count - len(last)
    if not earlier:
        return f"{errors_html(output)}{shown}"
    folded = html.escape("\n".join(output_lines(output, log_folder)[: -len(last)]))
    body = scrolled(f'<pre class="nba-output">{folded}</pre>')
    left_out = f", {output.left_out:,} of them left out" if output.left_out else ""
    return (
        f"{errors_html(output)}<details><summary>{counted(earlier, 'earlier line')}{left_out}</summary>{body}</details>"
        f"{shown}"
    )


def output_lines(output: OutputLog, log_folder: str) -> list[str]:
    """The kept output as text."""
    whole = f"; the whole output is in {log_folder}" if log_folder else ""
    gap = [f"… {counted(output.left_out, 'line')} left out{whole} …"] if output.left_out else []
    return [_line_text(line, output) for line in output.head] + gap + [_line_text(line, output) for line in output.tail]


def traceback_html(rank: int, traceback: str, *, is_open: bool, said: str) -> str:
    """Why the run failed.

    Args:
        rank: The rank that failed.
        traceback: Its traceback.
        is_open: Whether it is unfolded from the start.
        said: What to say about it besides; may be empty.
    """
    lines = list(plain_lines(traceback.strip()))
    left_out = len(lines) - _TRACEBACK_LINES
    # The last lines are kept: they say what was raised, and where.
    gap = [f"… {counted(left_out, 'line')} left out …"] if left_out > 0 else []
    text = html.escape("\n".join([*gap, *lines[-_TRACEBACK_LINES:]]))
    body = scrolled(f'<pre class="nba-output" aria-label="Traceback">{text}</pre>')
    return (
        f'<details class="nba-traceback"{" open" if is_open else ""}><summary>traceback of rank {rank}{said}</summary>'
        f"{body}</details>"
    )


def _line_text(line: RankLine, output: OutputLog) -> str:
    return f"{output.prefix(line.ranks)}{line.text}"


def _lines_html(lines: Iterable[RankLine], output: OutputLog) -> str:
    return "\n".join(f"{faint(output.prefix(line.ranks))}{html.escape(line.text)}" for line in lines)


def _marked(text: str, search: str) -> str:
    """The line, with what was searched for marked in it."""
    if not search:
        return html.escape(text)
    parts = re.split(f"({re.escape(search)})", text, flags=re.IGNORECASE)
    return "".join(f"<mark>{html.escape(part)}</mark>" if n % 2 else html.escape(part) for n, part in enumerate(parts))
