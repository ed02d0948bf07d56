"""What a schedule will do, said before it does it."""

from __future__ import annotations

import logging

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

__all__ = ["hint", "say"]

# The names under which torch's schedulers keep how many steps they are planned for.
_LENGTHS = ("total_steps", "T_max", "total_iters")

_logger = logging.getLogger("notebook_accel")


def say(scheduler: LRScheduler, *, ranks: int, window: int) -> None:
    """Logs the hint for a scheduler where several ranks advance it."""
    text = hint(scheduler, ranks=ranks, window=window)
    if text:
        _logger.warning(text)


def hint(scheduler: LRScheduler, *, ranks: int, window: int) -> str:
    """What each step of the optimizer does to a schedule, and where that ends it.

    Args:
        scheduler: As the user made it.
        ranks: How far a step of the optimizer advances it.
        window: Micro-batches in a step of the optimizer.

    Returns:
        Nothing where a schedule does what it would do in one process.
    """
    if ranks == 1 or isinstance(scheduler, ReduceLROnPlateau):
        return ""
    name = type(scheduler).__name__
    text = f"With {ranks} ranks, each step of the optimizer advances {name} by {ranks}"
    lengths = [getattr(scheduler, attribute) for attribute in _LENGTHS if hasattr(scheduler, attribute)]
    if not lengths:
        return f"{text}."
    length = int(lengths[0])
    steps = -(-length // ranks)
    batches = f", {steps * window} batches of each rank" if window > 1 else ""
    return f"{text}: its {length} steps end after {steps} steps of the optimizer{batches}."
