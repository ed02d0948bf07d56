"""What goes to the ranks: pickled, with what the user should know about it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from notebook_accel.errors import PayloadError
from notebook_accel.formatting import format_size
from notebook_accel.launching.ranks.worker import Target
from notebook_accel.payload import serialization

__all__ = ["label_of", "pickled", "say_what_is_large", "say_what_loses_its_graph"]

_LISTED_BYTES = 100_000_000


def pickled(
    target: Target, roots: Mapping[str, Any], may_stay: Sequence[str] = ()
) -> tuple[serialization.Pickled, dict[str, str]]:
    """Pickles the target, and prints what in it is large or changes on the way.

    Args:
        target: What is to be run.
        roots: What the user knows in it, by the words that a message uses for it.
        may_stay: Those of its names that are sent if they can be, and stay behind if not.

    Returns:
        The pickle, and which names stay behind, each with the reason.

    Raises:
        PayloadError: Something can't be sent.
    """
    left_out: dict[str, str] = {}
    try:
        done = _pickle(target, roots)
    except PayloadError:
        left_out = {name: why for name in may_stay if (why := _why_not(name, target.names[name]))}
        if not left_out:
            raise
        names = {name: value for name, value in target.names.items() if name not in left_out}
        roots = {label: value for label, value in roots.items() if label not in map(label_of, left_out)}
        done = _pickle(dataclasses.replace(target, names=names), roots)
    say_what_is_large(done.sizes_bytes)
    say_what_loses_its_graph(roots)
    return done, left_out


def _pickle(value: Any, roots: Mapping[str, Any]) -> serialization.Pickled:
    return serialization.pickle_by_value(value, roots=roots, namespace=sys.modules["__main__"].__dict__)


def _why_not(name: str, value: Any) -> str:
    try:
        _pickle(value, {label_of(name): value})
    except PayloadError as error:
        return error.what
    return ""


def label_of(name: str) -> str:
    """What a message calls a name of the notebook."""
    return f'global "{name}"'


def say_what_is_large(sizes_bytes: Mapping[str, int]) -> None:
    """Prints what of a pickle the user may not want to send."""
    large = {label: size for label, size in sizes_bytes.items() if size >= _LISTED_BYTES}
    if large:
        ordered = sorted(large, key=lambda label: -large[label])
        print("Sending to the ranks: " + ", ".join(f"{_name(label)} {format_size(large[label])}" for label in ordered))


def say_what_loses_its_graph(roots: Mapping[str, Any]) -> None:
    """Prints which of the tensors that are sent have a history that isn't."""
    labels = [_name(label) for label, value in roots.items() if getattr(value, "grad_fn", None) is not None]
    if labels:
        print(f"Sent without the graph of their gradients: {', '.join(labels)}", file=sys.stderr)


def _name(label: str) -> str:
    return label.removeprefix("global ").strip('"')
