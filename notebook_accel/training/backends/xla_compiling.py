"""What XLA compiles, and why: shown while it does, and warned of where a changed shape of the batch is the reason.

XLA compiles a step for the shapes that it sees, which takes long, and has it ready for the next step of these shapes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from notebook_accel.reporting import reporter

__all__ = ["Compilations", "count"]

_Shapes = tuple[tuple[int, ...], ...]


def count() -> int:
    """How many graphs this process has compiled."""
    import torch_xla.debug.metrics as metrics

    data = metrics.metric_data("CompileTime")
    return int(data[0]) if data else 0


class Compilations:
    """Follows one device's.

    Args:
        compiled: Counts what is compiled.
    """

    def __init__(self, compiled: Callable[[], int] = count) -> None:
        self._compiled = compiled
        self._count = 0
        self._known: set[_Shapes] = set()
        self._warned: set[str] = set()
        self._last: _Shapes = ()

    def batch(self, tensors: Sequence[torch.Tensor], previous: _Shapes | None) -> tuple[_Shapes, bool]:
        """Takes note of a batch that is on its way to the device; its shapes, and whether they are new.

        Args:
            tensors: The batch's.
            previous: The shapes of the batch before it in the same pass, ``None`` for the first.
        """
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        is_new = shapes not in self._known
        if is_new:
            if previous is not None:
                self._warn_once(
                    f"The batch's shape has changed from {_shown(previous)} to {_shown(shapes)}.",
                    "DataLoader(..., drop_last=True), or pad batches to one shape",
                )
            elif self._known:
                self._warn_once(
                    f"This loader's batches have the shape {_shown(shapes)}, and earlier ones {_shown(self._last)}.",
                    "the same batch size for training and evaluation, where memory allows it",
                )
            self._known.add(shapes)
        self._last = shapes
        return shapes, is_new

    def step_begins(self, *, is_new: bool) -> None:
        """A batch has been handed out. If its shapes are new, so is the program for it."""
        if is_new:
            reporter().set_compiling(True)

    def step_ended(self) -> None:
        """A step has been handed to the device: it is compiled by now, if it had to be."""
        before, self._count = self._count, self._compiled()
        reporter().set_compiling(self._count > before)

    def _warn_once(self, what: str, fix: str) -> None:
        kind = what.partition(" shape")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            text = f"{what} XLA compiles each step anew for it, which takes as long as the first steps. Fix: {fix}"
            warnings.warn(text, stacklevel=2)


def _shown(shapes: _Shapes) -> str:
    return ", ".join(map(str, shapes)) or "()"
