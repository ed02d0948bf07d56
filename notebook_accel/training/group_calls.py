"""What all ranks do together with their tensors, as methods."""

from __future__ import annotations

from typing import Any

from notebook_accel.training import collectives
from notebook_accel.training.accumulation import GradientState
from notebook_accel.training.process_control import ProcessControl

__all__ = ["GroupCalls"]


class GroupCalls(ProcessControl):
    """A rank whose batches the loaders count.

    Attributes:
        gradient_state: Where training stands.
    """

    gradient_state: GradientState

    def gather(self, tensor: Any) -> Any:
        """The ranks' tensors one after the other, on every rank: ``(n, ...)`` becomes ``(num_processes * n, ...)``.

        Takes nested lists, tuples and mappings of tensors. With one process they come back as they are.

        Raises:
            CollectiveError: Shapes or types differ between ranks; noticed before it happens where ranks are CPUs.
        """
        return collectives.gather(self._backend, tensor, self.gradient_state.tail)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like ``gather``, with each sample of an epoch once: what was repeated to fill the last batches is left out.

        Args:
            input_data: Nested tensors with as many rows for each sample of the batch that is out, mostly one; or a
                list of objects.
            use_gather_object: Gather a list as objects although its items are tensors.
        """
        return collectives.gather_for_metrics(
            self._backend, input_data, self.gradient_state.tail, use_gather_object=use_gather_object
        )

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The ranks' tensors made one, element by element, in new tensors, times ``scale``.

        Args:
            tensor: Nested tensors.
            reduction: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``; ``"none"`` is another name for the sum.
            scale: What the result is multiplied by.
        """
        return collectives.reduce(self._backend, tensor, reduction, scale)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Fills the ranks' tensors with those of one rank, in place, and returns them."""
        return collectives.broadcast(self._backend, tensor, from_process)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pads the ranks' tensors along ``dim`` to the length of the longest, so that they can be gathered."""
        return collectives.pad_across_processes(self._backend, tensor, dim, pad_index, pad_first)
