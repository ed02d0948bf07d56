"""What the ranks of a run returned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

__all__ = ["Results"]


class Results(Sequence[Any]):
    """What the ranks returned, one value a rank: ``results[0]`` is rank 0's."""

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = list(values)

    @overload
    def __getitem__(self, rank: int) -> Any: ...
    @overload
    def __getitem__(self, rank: slice) -> list[Any]: ...
    def __getitem__(self, rank: int | slice) -> Any:
        return self._values[rank]

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Results):
            return self._values == other._values
        return self._values == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it holds whatever ranks return, like a list

    def __repr__(self) -> str:
        return repr(self._values)
