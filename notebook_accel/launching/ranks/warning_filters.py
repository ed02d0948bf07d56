"""The notebook's filters of Python's ``warnings``, which the ranks take over: they start without any."""

from __future__ import annotations

import functools
import re
import types
import warnings
from collections.abc import Sequence
from typing import Any

from notebook_accel.launching.ranks.import_hooks import when_imported

# The arguments of ``warnings.filterwarnings``, the category as its module and its name there.
Filter = tuple[str, str, tuple[str, str], str, int]


def settings() -> list[Filter]:
    """Return this process's filters. Of those that fit a warning, the first counts."""
    return [described for described, _ in _rows()]


def _rows() -> list[tuple[Filter, Any]]:
    filters: Any = warnings.filters
    return [
        (
            (action, _text(message), (category.__module__, category.__qualname__), _text(module), line),
            (action, message, category, module, line),
        )
        for action, message, given, module, line in filters
        for category in (given if isinstance(given, tuple) else (given,))  # ``simplefilter`` takes several
    ]


def _text(pattern: Any) -> str:
    return getattr(pattern, "pattern", pattern) or ""


def take_over(found: Sequence[Filter]) -> None:
    """Set this process's filters. A filter for a class whose module isn't imported follows when it is."""
    present = dict(_rows())  # with compiled patterns: to compile one takes long in a fork
    own = [each for each in present if each not in found]
    # Those of libraries that only this process has imported count first, as if the notebook imported them now. Python's
    # own count last, since the notebook lacks them only if it has removed them.
    of_libraries = [each for each in own if each[1] or each[3] not in ("", "__main__")]
    of_python = [each for each in own if each not in of_libraries]
    warnings.resetwarnings()
    for each in reversed([*of_libraries, *found, *of_python]):
        _, _, (defined_in, _), _, _ = each
        if each in present:
            warnings.filters.insert(0, present[each])  # type: ignore[attr-defined]  # a list
        else:
            when_imported(defined_in, functools.partial(_add, each))


def _add(new: Filter, defined_in: types.ModuleType) -> None:
    action, message, (_, name), module, line = new
    category: Any = defined_in
    for part in name.split("."):
        category = getattr(category, part, None)
    if isinstance(category, type) and issubclass(category, Warning):
        filters: Any = warnings.filters
        # The flags are those of ``warnings.filterwarnings``.
        filters.insert(0, (action, _pattern(message, re.IGNORECASE), category, _pattern(module, 0), line))


class _Pattern:
    """A regular expression that is compiled when a warning is first compared with it: compiling takes 1 ms in a fork.

    Args:
        pattern: The expression, under the name that ``re.Pattern`` has for it.
        flags: Those of ``re.compile``.
    """

    def __init__(self, pattern: str, flags: int) -> None:
        self.pattern = pattern
        self._flags = flags

    def match(self, text: str) -> re.Match[str] | None:
        """Return the match at the start of ``text``. Python's ``warnings`` calls this."""
        return re.compile(self.pattern, self._flags).match(text)


def _pattern(text: str, flags: int) -> _Pattern | None:
    return _Pattern(text, flags) if text else None
