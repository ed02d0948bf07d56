"""The names of a rank's ``__main__``: which came from the notebook, and which are the rank's own. Runs in a rank.

What a cell of the session has assigned is the rank's own, and stays, whatever the notebook has under that name.
"""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Callable, Mapping
from typing import Any

from notebook_accel.payload import serialization
from notebook_accel.protocol.session_messages import Delivery

__all__ = ["Contents", "Names"]

_NOTHING = object()

# What a sealed file of the kernel's holds: names and values, objects that both sides number, modules to import, and
# what is called with which arguments.
Contents = tuple[
    dict[str, Any], list[Any], tuple[str, ...], "tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None"
]


class Names:
    """The names of one rank.

    Args:
        namespace: Its ``__main__``.

    Attributes:
        objects: What came from the notebook and can be referred to, by the number that both sides know it by.
    """

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._given = set(namespace)  # what every rank has from its start
        self._taken: dict[str, Any] = {}
        self._own: set[str] = set()
        self.objects: dict[int, Any] = {}

    @property
    def definitions(self) -> Mapping[int, Any]:
        """The notebook's functions and classes, as which they go back to it."""
        kinds = (type, types.FunctionType)
        return {number: obj for number, obj in self.objects.items() if isinstance(obj, kinds)}

    def take(self, delivery: Delivery, descriptor: int) -> Any:
        """Opens what the notebook has sent and binds its names; returns what is to be called, if anything."""
        before = dict(self._namespace)
        try:
            opened = serialization.load(descriptor, namespace=self._namespace, origins=self.objects)
        except BaseException:  # what has come so far would be taken for the rank's own, and never be sent again
            for name in self._namespace.keys() - before.keys():
                del self._namespace[name]
            self._namespace.update(before)
            raise
        names, shared, submodules, call = opened.value
        # A function brings along the values of the names that it uses. Those that the rank has, it must not change.
        self._namespace.update(before)
        arrived = {name: obj for name, obj in opened.by_value if name is not None and name not in before}
        arrived.update((name, obj) for name, obj in names.items() if name in delivery.by_force or not self.is_own(name))
        self._namespace.update(arrived)
        for name in self._namespace.keys() - before.keys() | arrived.keys():
            self._taken[name] = self._namespace[name]
        for number in delivery.forgotten:
            self.objects.pop(number, None)
        numbered = zip(delivery.numbers, [*shared, *(obj for _, obj in opened.by_value)], strict=True)
        self.objects.update((number, obj) for number, obj in numbered if number >= 0)
        for name in submodules:
            with contextlib.suppress(ImportError):  # then the code says what it misses, where it misses it
                importlib.import_module(name)
        return call

    def is_own(self, name: str) -> bool:
        """Return whether the rank has something under this name that isn't as it came from the notebook."""
        value = self._namespace.get(name, _NOTHING)
        return value is not _NOTHING and name not in self._given and self._taken.get(name, _NOTHING) is not value

    def changes(self) -> tuple[list[str], list[str]]:
        """The names that have become its own since the last call, and those that no longer are."""
        own = {name for name in self._namespace if self.is_own(name)}
        before, self._own = self._own, own
        return sorted(own - before), sorted(before - own)
