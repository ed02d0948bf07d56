"""The value of a cell as a notebook shows it: made in each rank, and put together here, equal ones in one line."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from notebook_accel.formatting import rank_spans
from notebook_accel.launching.ranks import mime_bundles

__all__ = ["Shown", "bundle", "ranks_in_words"]

_MOST_CHARACTERS = 20_000
_TEXT, _HTML = "text/plain", "text/html"
_IMAGES = ("image/png", "image/jpeg")


def bundle(value: Any) -> dict[str, str]:
    """How a value is shown, by mime type. Runs in a rank."""
    data = mime_bundles.sendable(mime_bundles.bundle_of(value)[0])
    text = data[_TEXT]
    if len(text) > _MOST_CHARACTERS:
        data[_TEXT] = f"{text[:_MOST_CHARACTERS]} … and {len(text) - _MOST_CHARACTERS:,} more characters"
    return {kind: shown for kind, shown in data.items() if isinstance(shown, str)}


class Shown:
    """What a cell's value looks like on each rank that has one. Values that look alike are shown once.

    Args:
        bundles: How each rank shows its value, by mime type.
    """

    def __init__(self, bundles: Mapping[int, dict[str, str]]) -> None:
        self._bundles = dict(sorted(bundles.items()))

    def __bool__(self) -> bool:
        return bool(self._bundles)

    def __getitem__(self, rank: int) -> str:
        """The text of one rank's value."""
        return self._bundles[rank][_TEXT]

    def __repr__(self) -> str:
        parts = []
        for ranks, data in self._groups():
            text = data[_TEXT]
            parts.append(f"{ranks_in_words(ranks)}:{chr(10) if chr(10) in text else ' '}{text}")
        return "\n".join(parts)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        del include, exclude
        shown = {_TEXT: repr(self)}
        markups = [(ranks, _markup(data)) for ranks, data in self._groups()]
        if any(markup for _, markup in markups):
            texts = [f"<pre>{html.escape(data[_TEXT])}</pre>" for _, data in self._groups()]
            shown[_HTML] = "".join(
                f"<div>{ranks_in_words(ranks)}:</div>{markup or text}"
                for (ranks, markup), text in zip(markups, texts, strict=True)
            )
        elif len(markups) == 1:  # Markdown, for example, which can only be shown by itself
            shown = {**self._groups()[0][1], **shown}
        return shown

    def _groups(self) -> list[tuple[list[int], dict[str, str]]]:
        """The ranks that show the same, in order of the first of them."""
        groups: list[tuple[list[int], dict[str, str]]] = []
        for rank, data in self._bundles.items():
            for ranks, other in groups:
                if other == data:
                    ranks.append(rank)
                    break
            else:
                groups.append(([rank], data))
        return groups


def _markup(data: Mapping[str, str]) -> str:
    """A value as HTML, in which values of several ranks can stand below each other; empty if it has no such form."""
    if _HTML in data:
        return data[_HTML]
    for kind in _IMAGES:
        if kind in data:
            return f'<img src="data:{kind};base64,{data[kind].strip()}">'
    return data.get("image/svg+xml", "")


def ranks_in_words(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    text = ", ".join(rank_spans(ranks))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
