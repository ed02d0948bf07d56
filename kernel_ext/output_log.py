"""What ranks wrote, line by line as plain text: the first lines, the last ones, and those that look like errors.

What it holds is bounded, however much they write.
"""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

from notebook_accel.formatting import plain_lines
from notebook_accel.launching.views.rank_lines import AlikeLines, RankLine, line_prefix
from notebook_accel.protocol import events

__all__ = ["OutputLog"]

_HEAD_LINES = 200
_TAIL_LINES = 800
_RANK_LINES = 200
_ERROR_LINES = 50
_MOMENT_S = 1.0  # after a line, in which other ranks that print the same are named in its margin

# The first and the last line of a traceback, what loggers write in capitals, and what compilers and C libraries write.
_ERROR = re.compile(
    r"^Traceback \(most recent call last\)|^[\w.]*(?:Error|Exception|KeyboardInterrupt)(?::|$)"
    r"|\b(?:ERROR|CRITICAL|FATAL)\b|\b(?:error|fatal): "
)


class OutputLog:
    """Lines of all ranks in the order in which they came: the first ones and the last ones.

    A line that several ranks print alike, within a moment of each other, is one line.

    Args:
        world_size: Number of ranks.
        prefix: Gives what stands before a line of these ranks. Default: their numbers.

    Attributes:
        prefix: See above.
        count: How many lines there were in all.
        error_count: How many of them looked like errors.
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
        """The first lines; what came after them is in ``tail``."""
        return list(self._head)

    @property
    def tail(self) -> list[RankLine]:
        """The last lines that are not in ``head``."""
        return [*self._tail, *self._newest.unsettled][-_TAIL_LINES:]

    @property
    def errors(self) -> list[RankLine]:
        """The last lines that look like errors, also those that are no longer among the others."""
        return list(self._errors)

    @property
    def left_out(self) -> int:
        """How many lines between ``head`` and ``tail`` were not kept."""
        return self.count - len(self._head) - len(self.tail)

    def take(self, rank: int, event: events.Output) -> None:
        """Take in what a rank has written."""
        if event.left_out:
            self.pass_over(rank, event.left_out)
        self.add(rank, list(plain_lines(event.text)), event.time_s)

    def pass_over(self, rank: int, count: int) -> None:
        """Lines that are in a log only came here. There is one gap: what is before it and not in ``head`` goes too."""
        self.count += count
        self._newest.settle()
        self._has_gap = True
        self._tail.clear()
        self._by_rank.pop(rank, None)

    def add(self, rank: int, texts: Sequence[str], now_s: float) -> None:
        """Appends lines.

        Args:
            rank: The rank that has printed them.
            texts: The lines.
            now_s: When they came, in seconds.
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
        """One rank's last lines, however much the others have written since."""
        return list(self._by_rank.get(rank, ()))

    def last(self, count: int) -> list[RankLine]:
        """The last ``count`` lines that were kept without a gap between them."""
        from_tail = list(itertools.islice(reversed(self.tail), count))
        missing = count - len(from_tail)
        from_head = self._head[-missing:] if missing > 0 and self.left_out == 0 else []
        return from_head + from_tail[::-1]

    def _keep(self, line: RankLine) -> None:
        """Takes a line that no other rank can join any more."""
        if len(self._head) < _HEAD_LINES and not self._has_gap:
            self._head.append(line)
        else:
            self._tail.append(line)
