"""Fingerprints of the notebook's values, by which the kernel finds out which ones have changed since they were sent."""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from notebook_accel.errors import PayloadError
from notebook_accel.interrupts import held
from notebook_accel.payload import serialization
from notebook_accel.sessions import shared_parts

_SMALL_BYTES = 1 << 14


class Fingerprint:
    """A value's state when it was sent. Refers to large values weakly, so that it doesn't keep them in memory."""

    def __init__(self, value: Any, pickled_bytes: int) -> None:
        is_small = pickled_bytes <= _SMALL_BYTES and not isinstance(value, shared_parts.BY_NAME)
        is_digested = is_small and not shared_parts.is_optimizer(value)  # that is digested without its tensors
        self.pickled_bytes = pickled_bytes
        self._refer = _reference(value)
        self._digest = _digest(value) if is_digested else None
        self._own_digest = _own_digest(value)
        self._versions = _versions(value)
        self._requires_grad = _requires_grad(value)
        self._statistics = _statistics(value)

    def matches(self, value: Any) -> bool:
        """Return whether a value is the same object as when it was sent, and hasn't changed."""
        is_same = self.has_values_of(value) and self._requires_grad == _requires_grad(value)
        is_known = self._digest is not None or self._own_digest is None  # a digest of the whole says it all
        return is_same and (is_known or self.differs_at_most_in_tensors(value))

    def has_values_of(self, value: Any) -> bool:
        """Return whether a value is the same object as when it was sent, and its tensors hold the same numbers."""
        if self._refer() is not value or self._versions != _versions(value):
            return False
        return self._digest is None or self._digest == _digest(value)

    def differs_at_most_in_tensors(self, value: Any) -> bool:
        """Return whether nothing about a value has changed, except the contents of a model's or optimizer's tensors."""
        if self._own_digest is None:
            return self.matches(value)
        is_same = self._refer() is value and self.has_statistics_of(value)
        return is_same and self._own_digest == _own_digest(value)

    def has_statistics_of(self, optimizer: Any) -> bool:
        """Return whether an optimizer has the same statistics, such as momenta, as when it was sent."""
        return self._statistics == _statistics(optimizer)


def fingerprint(value: Any) -> Fingerprint:
    """Return the fingerprint of a value that wasn't sent, but that the ranks have too."""
    pickled = pickled_alone(value, {})
    return Fingerprint(value, 0 if pickled is None else sum(pickled.sizes_bytes.values()))


def pickled_alone(value: Any, origins: Mapping[int, Any]) -> serialization.Pickled | None:
    """Return a value's pickle, ``None`` if the value can't be pickled."""
    try:
        return pickle_by_value(value, {"it": value}, origins)
    except PayloadError:
        return None


def pickle_by_value(value: Any, roots: Mapping[str, Any], origins: Mapping[int, Any]) -> serialization.Pickled:
    """Pickle a value as ``serialization.pickle_by_value`` does, with the notebook's namespace."""
    with held() as interrupts, interrupts.allowed():  # pickling runs methods of the user's objects
        namespace = sys.modules["__main__"].__dict__
        return serialization.pickle_by_value(value, roots=roots, namespace=namespace, origins=origins)


def _tensors(value: Any) -> list[Any]:
    return [value] if shared_parts.is_tensor(value) else [*shared_parts.tensors(value).values()]


def _versions(value: Any) -> int:
    """Return the number of writes to the tensors in a value."""
    return sum(tensor._version for tensor in _tensors(value) if not tensor.is_inference())


def _requires_grad(value: Any) -> list[bool]:
    return [tensor.requires_grad for tensor in _tensors(value)]


def _statistics(value: Any) -> list[tuple[int, int]]:
    """Return a mark of each of an optimizer's statistics, which changes with it; none for other values."""
    return [(id(each), _versions(each)) for each in _statistics_in(value)]


def _statistics_in(value: Any) -> list[Any]:
    if not shared_parts.is_optimizer(value):
        return []
    found = [each for each in value.state.values() if isinstance(each, Mapping)]  # by tensor, in all of torch's own
    return [each for of_tensor in found for each in of_tensor.values()]


def _digest(value: Any) -> int | None:
    if shared_parts.is_tensor(value):
        value = value.data  # whether it requires a gradient is no part of its values
    pickled = pickled_alone(value, {})  # without a pickle, the ranks keep the value that they have
    return None if pickled is None else zlib.crc32(pickled.data)


def _own_digest(value: Any) -> int | None:
    """Return a digest of an optimizer or a small model without its tensors; ``None`` for another value."""
    is_optimizer = shared_parts.is_optimizer(value)
    if not (is_optimizer or shared_parts.is_model(value)):
        return None
    tensors = [*_tensors(value), *filter(shared_parts.is_tensor, _statistics_in(value))]
    pickled = pickled_alone(value, {id(tensor): tensor for tensor in tensors})
    if pickled is None or (len(pickled.data) > _SMALL_BYTES and not is_optimizer):
        return None
    return zlib.crc32(pickled.data)


def _reference(value: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
