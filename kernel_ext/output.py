"""The ranks' output as plain text lines, and the panel's view of it, of their stacks and of their logs as HTML.

A log's memory is bounded, however much the ranks write. All text from ranks is escaped.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import html
import re
from collections.abc import Callable, Iterable, Sequence

from notebook_accel.formatting import OutputWindow, format_count, plain_lines
from notebook_accel.launching.views.rank_lines import AlikeLines, RankLine, margin
from notebook_accel.protocol import events

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
_MOST_OPEN_STACKS = 4


class OutputLog:
    """The first and the last lines of all ranks, in order of arrival, and those that look like errors.

    A line that several ranks print alike within a moment counts as one. ``prefix`` returns the margin of a line of
    these ranks, by default their numbers.
    """

    def __init__(self, world_size: int, prefix: Callable[[Iterable[int]], str] | None = None) -> None:
        self.prefix = prefix or functools.partial(margin, total=world_size)
        self.count = 0  # of lines in all
        self.error_count = 0  # of lines that looked like errors
        # The last of those that looked like errors, even if they are no longer in ``head`` or ``tail``.
        self.errors: collections.deque[RankLine] = collections.deque(maxlen=_ERROR_LINES)
        self.head: list[RankLine] = []  # the first lines; later ones are in ``tail``
        self._by_rank: dict[int, collections.deque[RankLine]] = {}
        self.window = OutputWindow[RankLine](_HEAD_LINES, _TAIL_LINES)
        self._newest = AlikeLines(world_size, _MOMENT_S, lambda line: self.head.extend(self.window.add([line])))

    @property
    def tail(self) -> list[RankLine]:
        """The last lines that aren't in ``head``."""
        return [*self.window.tail, *self._newest.unsettled]

    @property
    def left_out(self) -> int:
        """Number of lines between ``head`` and ``tail`` that weren't kept."""
        return self.window.left_out

    def take(self, rank: int, event: events.Output) -> None:
        if event.left_out:
            self.pass_over(rank, event.left_out)
        self.add(rank, list(plain_lines(event.text)), event.time_s)

    def pass_over(self, rank: int, count: int) -> None:
        """Count a rank's lines that are only in its log."""
        self.count += count
        self._newest.settle()
        self.window.pass_over(count)
        self._by_rank.pop(rank, None)

    def add(self, rank: int, texts: Sequence[str], now_s: float) -> None:
        """Add lines that a rank printed, and that arrived at ``now_s``."""
        of_rank = self._by_rank.setdefault(rank, collections.deque(maxlen=_RANK_LINES))
        for line in self._newest.add(rank, texts, now_s):
            of_rank.append(line)
            if len(line.ranks) > 1:
                continue
            self.count += 1
            if _ERROR.search(line.text):
                self.error_count += 1
                self.errors.append(line)

    def of_rank(self, rank: int) -> list[RankLine]:
        """Return one rank's last lines, however much the others have written since."""
        return list(self._by_rank.get(rank, ()))

    def last(self, count: int) -> list[RankLine]:
        """Return the last ``count`` lines that were kept without a gap."""
        kept = self.tail if self.left_out else [*self.head, *self.tail]
        return kept[-count:]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The reader's choice for the panel's part below the table: a rank if not all, and a text to search."""

    rank: int | None = None
    search: str = ""

    def finds(self, text: str) -> bool:
        return self.search.lower() in text.lower()


def output_html(output: OutputLog, choice: Choice = Choice()) -> str:
    """Show the last lines of output, the newest last."""
    if choice.search:
        kept = [*output.head, *output.tail] if choice.rank is None else output.of_rank(choice.rank)
        found = [line for line in kept if choice.finds(line.text)]
        of = f"{len(found):,} of {format_count(len(kept), 'line')}" + (" that are kept here" if output.left_out else "")
        return pre(f"{faint(of)}\n{_lines_html(found[-_MOST_FOUND:], output, choice.search)}", "Output found")
    lines = output.last(_LIVE_LINES) if choice.rank is None else output.of_rank(choice.rank)[-_LIVE_LINES:]
    earlier = output.count - len(lines) if choice.rank is None else 0
    note = f"{faint(format_count(earlier, 'earlier line'))}\n" if earlier else ""
    return pre(note + (_lines_html(lines, output) if lines else faint("no output yet")), "Output")


def errors_html(output: OutputLog, choice: Choice = Choice()) -> str:
    """Show the last lines that look like errors; empty if there are none."""
    errors = [line for line in output.errors if choice.rank is None or choice.rank in line.ranks]
    if not errors:
        return ""
    count = output.error_count if choice.rank is None else len(errors)
    head = "1 line that looks like an error" if count == 1 else f"{count:,} lines that look like errors"
    shown = errors[-_ERRORS_IN_VIEW:]
    last = f", the last {len(shown)}" if count > len(shown) else ""
    lines = pre(_lines_html(shown, output))
    return f'<div class="nba-errors" role="group" aria-label="Errors"><b>{head}{last}</b>{lines}</div>'


def stacks_html(stacks: Sequence[str], said: str, choice: Choice) -> str:
    """Show each rank's stack: its first line, with the rest folded below it where ranks are many.

    ``said`` is a line above the stacks, such as the time of the request.
    """
    chosen = [text for rank, text in enumerate(stacks) if choice.rank in (None, rank) and choice.finds(text)]
    is_open = "open" if len(chosen) <= _MOST_OPEN_STACKS else ""
    shown = [f'<p class="nba-said nba-faint" role="status">{html.escape(said)}</p>']
    for text in chosen:
        first, _, rest = text.partition("\n")
        one_line = f'<p class="nba-said">{html.escape(first)}</p>'
        shown.append(folded(first, pre(html.escape(rest)), is_open) if rest else one_line)
    return "".join(shown)


def log_html(files: Sequence[str], text: str, choice: Choice, first_rank: int = 0) -> str:
    """List the log files of all ranks, or show the end of one rank's.

    ``text`` are the last lines of the chosen rank's file, or why there are none. ``first_rank`` is the number of this
    node's first rank among all.
    """
    if choice.rank is None or choice.rank >= len(files):
        rows = "\n".join(f"{faint(f'rank {rank}')}  {html.escape(path)}" for rank, path in enumerate(files, first_rank))
        return pre(rows or faint("this run has no log files"), "Log files")
    body = "\n".join(_marked(line, choice.search) for line in plain_lines(text) if choice.finds(line))
    return pre(f"{faint(files[choice.rank])}\n{body}", "Log")


def whole_output_html(output: OutputLog, log_folder: str) -> str:
    """Show the kept output: the last lines in view, the ones before them folded."""
    if not output.count:
        return pre(faint("no output"), "Output")
    last = output.last(_MOST_UNFOLDED_LINES if output.count <= _MOST_UNFOLDED_LINES else _OPEN_LINES)
    earlier = output.count - len(last)
    before = ""
    if earlier:
        body = scrolled(pre(html.escape("\n".join(output_lines(output, log_folder)[: -len(last)]))))
        left_out = f", {output.left_out:,} of them left out" if output.left_out else ""
        before = folded(f"{format_count(earlier, 'earlier line')}{left_out}", body)
    return f"{errors_html(output)}{before}{pre(_lines_html(last, output), 'Output')}"


def output_lines(output: OutputLog, log_folder: str) -> list[str]:
    """Return the kept output as text."""
    head, tail = ([f"{output.prefix(line.ranks)}{line.text}" for line in part] for part in (output.head, output.tail))
    return [*head, *output.window.gap(log_folder), *tail]


def _lines_html(lines: Iterable[RankLine], output: OutputLog, search: str = "") -> str:
    return "\n".join(f"{faint(output.prefix(line.ranks))}{_marked(line.text, search)}" for line in lines)


def _marked(text: str, search: str) -> str:
    """Escape a line, and highlight the searched text in it."""
    parts = re.split(f"({re.escape(search)})", text, flags=re.IGNORECASE) if search else [text]
    return "".join(f"<mark>{html.escape(part)}</mark>" if n % 2 else html.escape(part) for n, part in enumerate(parts))


def pre(body: str, label: str = "") -> str:
    """Show HTML as lines of output."""
    named = f' aria-label="{label}"' if label else ""
    return f'<pre class="nba-output"{named}>{body}</pre>'


def scrolled(body: str) -> str:
    """Put long content into a box that scrolls, with its end in view."""
    return f'<div class="nba-scrollback" tabindex="0">{body}</div>'


def folded(title: str, body: str, attributes: str = "") -> str:
    """Show HTML below a title that opens and closes it."""
    return f"<details {attributes}><summary>{html.escape(title)}</summary>{body}</details>"


def faint(text: str) -> str:
    """Show text in a fainter colour."""
    return f'<span class="nba-faint">{html.escape(text)}</span>'
