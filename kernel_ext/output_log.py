"""What ranks wrote, line by line as plain text: the first lines, the last ones, and those that look like errors.

What it holds is bounded, however much they write.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Sequence

from notebook_accel import events
from notebook_accel.plain_text import plain_lines

__all__ = ["OutputLine", "OutputLog"]

_HEAD_LINES = 200
_TAIL_LINES = 800
_RANK_LINES = 200
_ERROR_LINES = 50

# The first and the last line of a traceback, what loggers write in capitals, and what compilers and C libraries write.
_ERROR = re.compile(
    r"^Traceback \(most recent call last\)|^[\w.]*(?:Error|Exception|KeyboardInterrupt)(?::|$)"
    r"|\b(?:ERROR|CRITICAL|FATAL)\b|\b(?:error|fatal): "
)


@dataclasses.dataclass(frozen=True)
class OutputLine:
    """One line that a rank wrote."""

    rank: int
    text: str


class OutputLog:
    """Lines of all ranks in the order in which they came: the first ones and the last ones.

    Args:
        world_size: Number of ranks.
        prefixes: What stands before the ranks' lines; empty for their numbers.

    Attributes:
        count: How many lines there were in all.
        error_count: How many of them looked like errors.
    """

    def __init__(self, world_size: int = 1, prefixes: Sequence[str] = ()) -> None:
        self._prefixes = prefixes or [f"{rank:>{len(str(world_size - 1))}} │ " for rank in range(world_size)]
        self.count = 0
        self.error_count = 0
        self._errors: collections.deque[OutputLine] = collections.deque(maxlen=_ERROR_LINES)
        self._by_rank: dict[int, collections.deque[OutputLine]] = {}
        self._head: list[OutputLine] = []
        self._tail: collections.deque[OutputLine] = collections.deque(maxlen=_TAIL_LINES)

    @property
    def head(self) -> list[OutputLine]:
        """The first lines; what came after them is in ``tail``."""
        return list(self._head)

    @property
    def tail(self) -> list[OutputLine]:
        """The last lines that are not in ``head``."""
        return list(self._tail)

    @property
    def errors(self) -> list[OutputLine]:
        """The last lines that look like errors, also those that are no longer among the others."""
        return list(self._errors)

    @property
    def left_out(self) -> int:
        """How many lines between ``head`` and ``tail`` were not kept."""
        return self.count - len(self._head) - len(self._tail)

    def prefix(self, line: OutputLine) -> str:
        """Return what stands before a line."""
        return self._prefixes[line.rank]

    def take(self, rank: int, event: events.Output) -> None:
        """Take in what a rank has written."""
        if event.left_out:
            self.pass_over(rank, event.left_out)
        for text in plain_lines(event.text):
            self.add(OutputLine(rank, text))

    def pass_over(self, rank: int, count: int) -> None:
        """Lines that are in a log only came here. There is one gap: what is before it and not in ``head`` goes too."""
        self.count += count
        self._tail.clear()
        self._by_rank.pop(rank, None)

    def add(self, line: OutputLine) -> None:
        """Appends a line."""
        self.count += 1
        if len(self._head) < _HEAD_LINES and self.count == len(self._head) + 1:
            self._head.append(line)
        else:
            self._tail.append(line)
        self._by_rank.setdefault(line.rank, collections.deque(maxlen=_RANK_LINES)).append(line)
        if _ERROR.search(line.text):
            self.error_count += 1
            self._errors.append(line)

    def of_rank(self, rank: int) -> list[OutputLine]:
        """One rank's last lines, however much the others have written since."""
        return list(self._by_rank.get(rank, ()))

    def last(self, count: int) -> list[OutputLine]:
        """The last ``count`` lines that were kept without a gap between them."""
        from_tail = list(itertools.islice(reversed(self._tail), count))
        missing = count - len(from_tail)
        from_head = self._head[-missing:] if missing > 0 and self.left_out == 0 else []
        return from_head + from_tail[::-1]
