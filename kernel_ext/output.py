"""The ranks' output as plain text lines, and the panel's view of it, of their stacks and of their logs as HTML.

A log's memory is bounded, however much the ranks write. Everything that a rank said is escaped.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import html
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from kernel_ext.markup import counted, faint, scrolled
from notebook_accel.formatting import plain_lines
from notebook_accel.launching.views.rank_lines import AlikeLines, RankLine, line_prefix
from notebook_accel.protocol import events

__all__ = [
    "Choice",
    "OutputLog",
    "errors_html",
    "log_html",
    "output_html",
    "output_lines",
    "stacks_html",
    "traceback_html",
    "whole_output_html",
]

_HEAD_LINES = 200
_TAIL_LINES = 800
_RANK_LINES = 200
_ERROR_LINES = 50
_MOMENT_S = 1.0  # other ranks that print the same line within this time are named in its margin

# The first and the last line of a traceback, a logger's levels in capitals, and errors of compilers and C libraries.
_ERROR = re.compile(
    r"^Traceback \(most recent call last\)|^[\w.]*(?:Error|Exception|KeyboardInterrupt)(?::|$)"
    r"|\b(?:ERROR|CRITICAL|FATAL)\b|\b(?:error|fatal): "
)
_LIVE_LINES = 100
_MOST_FOUND = 200
_ERRORS_IN_VIEW = 3
_MOST_UNFOLDED_LINES = 30
_OPEN_LINES = 12  # in view when the rest is folded
_TRACEBACK_LINES = 200
_MOST_OPEN_STACKS = 4


class OutputLog:
    """The first and the last lines of all ranks, in order of arrival, and those that look like errors.

    A line that several ranks print alike within a moment counts as one.

    Args:
        world_size: Number of ranks.
        prefix: Returns the margin of a line of these ranks. Default: their numbers.

    Attributes:
        prefix: See above.
        count: Number of lines in all.
        error_count: Number of lines that looked like errors.
    """

    def __init__(self, world_size: int, prefix: Callable[[Iterable[int]], str] | None = None) -> None:
        self.prefix = prefix or functools.partial(line_prefix, total=world_size)
        self.count = 0
        self.error_count = 0
        self._errors: collections.deque[RankLine] = collections.deque(maxlen=_ERROR_LINES)
        self._by_rank: dict[int, collections.deque[RankLine]] = {}
        self._head: list[RankLine] = []
        self._tail: collections.deque[RankLine] = collections.deque(maxlen=_TAIL_LINES)
        self._has_gap = False
        self._newest = AlikeLines(world_size, _MOMENT_S, self._keep)

    @property
    def head(self) -> list[RankLine]:
        """The first lines. Later ones are in ``tail``."""
        return list(self._head)

    @property
    def tail(self) -> list[RankLine]:
        """The last lines that aren't in ``head``."""
        return [*self._tail, *self._newest.unsettled][-_TAIL_LINES:]

    @property
    def errors(self) -> list[RankLine]:
        """The last lines that look like errors, even if they are no longer in ``head`` or ``tail``."""
        return list(self._errors)

    @property
    def left_out(self) -> int:
        """Number of lines between ``head`` and ``tail`` that weren't kept."""
        return self.count - len(self._head) - len(self.tail)

    def take(self, rank: int, event: events.Output) -> None:
        """Add what a rank has written."""
        if event.left_out:
            self.pass_over(rank, event.left_out)
        self.add(rank, list(plain_lines(event.text)), event.time_s)

    def pass_over(self, rank: int, count: int) -> None:
        """Count lines that are only in a log. There is one gap: lines before it that aren't in ``head`` go too."""
        self.count += count
        self._newest.settle()
        self._has_gap = True
        self._tail.clear()
        self._by_rank.pop(rank, None)

    def add(self, rank: int, texts: Sequence[str], now_s: float) -> None:
        """Add lines.

        Args:
            rank: The rank that printed them.
            texts: The lines.
            now_s: Time of arrival, in seconds.
        """
        of_rank = self._by_rank.setdefault(rank, collections.deque(maxlen=_RANK_LINES))
        for line in self._newest.add(rank, texts, now_s):
            of_rank.append(line)
            if len(line.ranks) > 1:
                continue
            self.count += 1
            if _ERROR.search(line.text):
                self.error_count += 1
                self._errors.append(line)

    def of_rank(self, rank: int) -> list[RankLine]:
        """Return one rank's last lines, however much the others have written since."""
        return list(self._by_rank.get(rank, ()))

    def last(self, count: int) -> list[RankLine]:
        """Return the last ``count`` lines that were kept without a gap."""
        from_tail = list(itertools.islice(reversed(self.tail), count))
        missing = count - len(from_tail)
        from_head = self._head[-missing:] if missing > 0 and self.left_out == 0 else []
        return from_head + from_tail[::-1]

    def _keep(self, line: RankLine) -> None:
        """Keep a line that no other rank can join any more."""
        if len(self._head) < _HEAD_LINES and not self._has_gap:
            self._head.append(line)
        else:
            self._tail.append(line)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The reader's choice of what the panel shows below the table.

    Attributes:
        view: Which of the three views.
        rank: The rank shown, ``None`` for all.
        search: Show only lines with this text, ignoring case; empty for all lines.
    """

    view: Literal["output", "stacks", "log"] = "output"
    rank: int | None = None
    search: str = ""

    def finds(self, text: str) -> bool:
        """Return whether a line contains the searched text."""
        return self.search.lower() in text.lower()


def output_html(output: OutputLog, choice: Choice = Choice()) -> str:
    """Show the last lines of output, the newest last."""
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
    """Show the last lines that look like errors; empty if there are none."""
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
    """Show each rank's stack: its first line, with the rest folded below it where ranks are many.

    Args:
        stacks: A text for each rank.
        said: A line above them, such as when they were asked.
        choice: The reader's choice.
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
    """List the log files of all ranks, or show the end of one rank's.

    Args:
        files: The paths.
        text: The last lines of the chosen rank's file, or why there are none.
        choice: The reader's choice.
    """
    if choice.rank is None or choice.rank >= len(files):
        rows = "\n".join(f"{faint(f'rank {rank}')}  {html.escape(path)}" for rank, path in enumerate(files))
        return f'<pre class="nba-output" aria-label="Log files">{rows or faint("this run has no log files")}</pre>'
    lines = [line for line in plain_lines(text) if choice.finds(line)]
    body = "\n".join(_marked(line, choice.search) for line in lines)
    return f'<pre class="nba-output" aria-label="Log">{faint(files[choice.rank])}\n{body}</pre>'


def whole_output_html(output: OutputLog, log_folder: str) -> str:
    """Show the kept output: the last lines in view, the ones before them folded."""
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
    """Return the kept output as text."""
    whole = f"; the whole output is in {log_folder}" if log_folder else ""
    gap = [f"… {counted(output.left_out, 'line')} left out{whole} …"] if output.left_out else []
    return [_line_text(line, output) for line in output.head] + gap + [_line_text(line, output) for line in output.tail]


def traceback_html(rank: int, traceback: str, *, is_open: bool, said: str) -> str:
    """Show the failed rank's traceback.

    Args:
        rank: The rank that failed.
        traceback: Its traceback.
        is_open: Whether it is unfolded from the start.
        said: A remark after the title; may be empty.
    """
    lines = list(plain_lines(traceback.strip()))
    left_out = len(lines) - _TRACEBACK_LINES
    # Keep the last lines, which say what was raised, and where.
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
    """Highlight the searched text in a line."""
    if not search:
        return html.escape(text)
    parts = re.split(f"({re.escape(search)})", text, flags=re.IGNORECASE)
    return "".join(f"<mark>{html.escape(part)}</mark>" if n % 2 else html.escape(part) for n, part in enumerate(parts))
