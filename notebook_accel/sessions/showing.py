"""The value of a cell as a notebook shows it: made in each rank, and put together here, equal ones in one line."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

__all__ = ["Shown", "bundle", "ranks_in_words"]

_MOST_CHARACTERS = 20_000


def bundle(value: Any) -> dict[str, str]:
    """How a value is shown, by mime type. Runs in a rank."""
    text = repr(value)
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]} … and {len(text) - _MOST_CHARACTERS:,} more characters"
    data = {"text/plain": text}
    markup = getattr(type(value), "_repr_html_", lambda _: None)(value)
    if isinstance(markup, str):
        data["text/html"] = markup
    return data


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
        return self._bundles[rank]["text/plain"]

    def __repr__(self) -> str:
        parts = []
        for ranks, data in self._groups():
            text = data["text/plain"]
            parts.append(f"{ranks_in_words(ranks)}:{chr(10) if chr(10) in text else ' '}{text}")
        return "\n".join(parts)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        del include, exclude
        shown = {"text/plain": repr(self)}
        if any("text/html" in data for data in self._bundles.values()):
            shown["text/html"] = "".join(
                f"<div>{ranks_in_words(ranks)}:</div>"
                + data.get("text/html", f"<pre>{html.escape(data['text/plain'])}</pre>")
                for ranks, data in self._groups()
            )
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


def ranks_in_words(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(map(str, dict.fromkeys(span))) for span in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"
