"""Ranks' output as it is shown: harmless text, and one line for what several ranks print alike.

Text that a rank wrote loses its control sequences, and no line is longer than a screen or two.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import itertools
import operator
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["AlikeLines", "RankLine", "clipped", "first_line", "line_prefix", "plain_lines", "plain_text", "rank_spans"]

_MOST_CHARACTERS = 2000
_MOST_UNSETTLED = 500  # lines that others may still join
_MOST_PASSED = 64  # lines that one may be moved past, so that a flood costs nothing
# The agent reads one log after the other, about ten times a second: between lines of different ranks that came this
# close together, the order of arrival is only the order of reading.
_TOGETHER_S = 0.1
_MOST_SPANS = 5  # in the margin
_ROLE = "default_role"  # what torch calls it

# ECMA-48 control sequences (colours, cursor movements) and operating system commands (titles, links).
_ESCAPE_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def plain_lines(text: str) -> Iterator[str]:
    """The lines of a text as ``plain_text`` leaves them, none longer than a screen or two."""
    return (clipped(plain_text(line)) for line in text.split("\n"))


def first_line(text: str) -> str:
    """The first line of a text, as ``plain_text`` leaves it."""
    return next(plain_lines(text.strip()))


def plain_text(line: str) -> str:
    """A line as a terminal would leave it, without colours: what a carriage return overwrites is left out."""
    line = _ESCAPE_SEQUENCE.sub("", line).rstrip("\r")
    return _CONTROL_CHARACTER.sub("\N{REPLACEMENT CHARACTER}", line.rpartition("\r")[2])


def clipped(line: str) -> str:
    """The beginning of a line that is too long to be read, with how much is missing."""
    if len(line) <= _MOST_CHARACTERS:
        return line
    return f"{line[:_MOST_CHARACTERS]} … and {len(line) - _MOST_CHARACTERS:,} more characters"


def rank_spans(ranks: Iterable[int]) -> list[str]:
    """The ranks as spans, such as ``["0-2", "5"]``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return ["-".join(map(str, span)) for span in spans]


def line_prefix(ranks: Iterable[int], total: int, *, first: int = 0, template: str = "") -> str:
    """What stands before a line that these ranks print.

    Args:
        ranks: Their numbers on this node.
        total: Number of ranks on all nodes. The margin is as wide as if all of them had printed the line.
        first: The number of this node's first rank among all.
        template: The option ``log_line_prefix_template``; empty for ``0-7 │``.
    """
    local = _label(ranks)
    label = _label(first + rank for rank in ranks) if first else local
    if not template:
        return f"{label:>{len(_label(range(total)))}} │ "
    return string.Template(template).substitute(role_name=_ROLE, rank=label, local_rank=local)


def _label(ranks: Iterable[int]) -> str:
    spans = rank_spans(ranks)
    left_out = len(spans) - _MOST_SPANS
    return ",".join([*spans[:_MOST_SPANS], *([f"+{left_out}"] if left_out > 0 else [])])


@dataclasses.dataclass(slots=True, eq=False)
class RankLine:
    """One line as it is shown, and the ranks that printed it.

    Attributes:
        ranks: Their numbers on this node.
        text: The line.
        came_s: When the first of them printed it, in seconds.
        due_s: From when on no other rank can join it, in seconds.
        number: Its place among the lines that are not settled.
    """

    ranks: set[int]
    text: str
    came_s: float
    due_s: float
    number: int


class AlikeLines:
    """Puts the ranks' lines into the order in which they are shown. A line that several ranks print alike stands once.

    A rank's line joins an equal line of other ranks that came a moment before. No line is lost, and every rank's lines
    stay in the order in which the rank printed them. Other lines of different ranks stay in order of arrival, unless
    they came so close together that this order means nothing.

    Args:
        world_size: Number of ranks here.
        moment_s: How many seconds after a line others may still join it.
        settle: Takes each line in order, when no rank can join it any more.
    """

    def __init__(self, world_size: int, moment_s: float, settle: Callable[[RankLine], object]) -> None:
        self._world_size = world_size
        self._moment_s = moment_s
        self._settle = settle
        self._unsettled: collections.OrderedDict[int, RankLine] = collections.OrderedDict()
        self._by_text: dict[str, list[RankLine]] = {}  # in order, as the numbers are
        self._last: dict[int, int] = {}  # the number of each rank's last line
        self._next = 0

    @property
    def unsettled(self) -> list[RankLine]:
        """The lines that others may still join, in order."""
        return list(self._unsettled.values())

    def add(self, rank: int, texts: Sequence[str], now_s: float) -> list[RankLine]:
        """Takes what a rank has printed.

        Args:
            rank: The rank.
            texts: Its lines.
            now_s: When they came, in seconds.

        Returns:
            The line that each of them is now part of. It has one rank only if it is a new one.
        """
        self.settle(now_s)
        if len(texts) > _MOST_UNSETTLED:  # a flood, which nobody reads line by line
            self.settle()
            lines = [RankLine({rank}, text, now_s, now_s, 0) for text in texts]
            for line in lines:
                self._settle(line)
            return lines
        lines = []
        for index, text in enumerate(texts):
            joined = self._joinable(rank, texts, index, now_s) if text in self._by_text else None
            if joined is None:
                joined = RankLine(set(), text, now_s, now_s + self._moment_s, 0)
                self._append(joined)
            joined.ranks.add(rank)
            self._last[rank] = joined.number
            lines.append(joined)
            if len(self._unsettled) > _MOST_UNSETTLED:
                self._settle_first()
        self.settle(now_s)
        return lines

    def settle(self, now_s: float = float("inf")) -> None:
        """Settles the lines that no rank can join any more; without a time, all lines."""
        while self._unsettled:
            first = next(iter(self._unsettled.values()))
            if first.due_s > now_s and len(first.ranks) < self._world_size:
                break
            self._settle_first()

    def _settle_first(self) -> None:
        _, line = self._unsettled.popitem(last=False)
        self._forget_text(line)
        self._settle(line)

    def _append(self, line: RankLine) -> None:
        line.number, self._next = self._next, self._next + 1
        self._unsettled[line.number] = line
        self._by_text.setdefault(line.text, []).append(line)

    def _forget_text(self, line: RankLine) -> None:
        equal = self._by_text[line.text]
        equal.remove(line)
        if not equal:
            del self._by_text[line.text]

    def _joinable(self, rank: int, texts: Sequence[str], index: int, now_s: float) -> RankLine | None:
        """The line that this rank can join with the text at ``index``, moved below what the rank has printed before."""
        equal = self._by_text[texts[index]]
        below = bisect.bisect_right(equal, self._last.get(rank, -1), key=operator.attrgetter("number"))
        if below < len(equal):
            return equal[below]
        oldest = self._next - _MOST_PASSED
        above = itertools.takewhile(lambda line: rank not in line.ranks and line.number >= oldest, reversed(equal))
        line = next(iter(collections.deque(above, maxlen=1)), None)  # the first of them
        if line is not None and self._move_to_end(line, rank, texts[index + 1 : index + _MOST_PASSED], now_s):
            return line
        return None

    def _move_to_end(self, line: RankLine, rank: int, coming: Sequence[str], now_s: float) -> bool:
        """Moves a line to the end, with all that its ranks have printed after it; returns whether that was possible.

        What is moved is joined by this rank next, was joined by others, or has come together with what it passes.
        """
        from_line = itertools.takewhile(lambda other: other.number >= line.number, reversed(self._unsettled.values()))
        moved, passed, ranks = [line], [], set(line.ranks)
        matched = 0
        for other in list(from_line)[-2::-1]:
            if ranks.isdisjoint(other.ranks):
                passed.append(other)
                continue
            moved.append(other)
            ranks |= other.ranks
            if matched < len(coming) and other.text == coming[matched]:
                matched += 1
            elif len(other.ranks) == 1 and now_s - other.came_s > _TOGETHER_S:
                return False
        if rank in ranks:
            return False
        for other in passed:
            other.due_s = min(other.due_s, line.due_s)  # so that what is moved need not wait for them
        for other in moved:
            del self._unsettled[other.number]
            self._forget_text(other)
            self._append(other)
            self._last.update(dict.fromkeys(other.ranks, other.number))
        return True
