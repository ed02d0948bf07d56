"""Objects that ranks have made together, in the same order, so that they can find each other's counterparts again."""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Gather", "Roster"]

_T = TypeVar("_T")
_U = TypeVar("_U")
_Key = tuple[int, int]

Gather = Callable[[Any], list[Any]]
"""Gives the ranks' objects, in order of rank."""


class Roster(Generic[_T, _U]):
    """What was made in this process and is still there, each with something that belongs to it."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._entries: dict[_Key, tuple[weakref.ref[Any], _U]] = {}

    def __contains__(self, obj: object) -> bool:
        return any(ref() is obj for ref, _ in self._entries.values())

    def add(self, obj: _T, description: str, belonging: _U) -> None:
        """Takes note of an object, which it doesn't keep.

        Args:
            obj: It.
            description: Of its counterparts as well, and of nothing that can't be one.
            belonging: What belongs to it.
        """
        key = next(self._numbers), zlib.crc32(description.encode())
        entries = self._entries
        entries[key] = weakref.ref(obj, lambda _: entries.pop(key, None)), belonging

    def clear(self) -> None:
        """Forgets all of it, and counts anew: from now on ranks have other counterparts, such as one that is new."""
        self._numbers = itertools.count()
        self._entries = {}

    def match(self, gather: Gather) -> tuple[list[tuple[_T, _U]], list[_T]]:
        """What all ranks still have, in the same order on all of them, and what only some have. All ranks call it."""
        alive = {
            key: (obj, belonging) for key, (ref, belonging) in list(self._entries.items()) if (obj := ref()) is not None
        }
        by_rank: list[list[_Key]] = gather(sorted(alive))
        common = set(by_rank[0]).intersection(*by_rank[1:])
        # Ranks number them alike, unless one was interrupted in the middle of making one.
        self._numbers = itertools.count(1 + max((number for keys in by_rank for number, _ in keys), default=-1))
        return [alive[key] for key in sorted(common)], [alive[key][0] for key in sorted(alive) if key not in common]
