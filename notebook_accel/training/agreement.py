"""Ranks compare what they are about to do together, so that those who disagree are told instead of hanging."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence

import torch

from notebook_accel import code_places
from notebook_accel.errors import CollectiveError
from notebook_accel.training.backends.backend import Backend

__all__ = ["agree", "agree_on_model", "disagreement"]

_SHOWN_DIFFERENCES = 3


def agree(backend: Backend, operation: str, tensors: Sequence[torch.Tensor] = ()) -> None:
    """Compares an operation and its tensors, where the backend asks for that.

    Raises:
        CollectiveError: The ranks don't agree. All get it, and the group can still be used.
    """
    if backend.compares_calls:
        _compare(backend, operation + "".join(f" {_kind_of(tensor)}" for tensor in tensors))


def agree_on_model(backend: Backend, model: torch.nn.Module) -> None:
    """Compares the parameters of a model that every rank prepares, before their gradients are averaged.

    Raises:
        CollectiveError: A rank prepares another model, or does something else.
    """
    if backend.place.world_size == 1:
        return
    parameters = [f"{name} {_kind_of(parameter)}" for name, parameter in model.named_parameters()]
    operation = f"prepare a {type(model).__name__} of {len(parameters)} parameters"
    if backend.compares_calls:
        _compare(backend, operation, parameters)
    else:
        _refuse_differences(backend, operation, parameters)


def disagreement(calls: Sequence[str]) -> CollectiveError:
    """The error that shows each rank's call, in order of rank."""
    by_rank = "\n".join(f"  rank {rank}: {call}" for rank, call in enumerate(calls))
    return CollectiveError(
        f"The ranks disagree about a collective:\n{by_rank}",
        why="All ranks have to call the same ones in the same order, with tensors of the same shapes and types.",
        fix="pad_across_processes for different lengths; keep collectives out of `if accelerator.is_main_process:`",
    )


def _compare(backend: Backend, call: str, details: Sequence[str] = ()) -> None:
    digest = zlib.crc32("\n".join([call, *details]).encode())
    digests = backend.all_gather(torch.tensor([digest]))
    if bool((digests != digests[0]).any()):
        _refuse_differences(backend, call, details)


def _refuse_differences(backend: Backend, call: str, details: Sequence[str]) -> None:
    where = code_places.describe(sys._getframe(1)).rpartition(" at ")[2]
    by_rank: list[tuple[str, Sequence[str], str]] = backend.all_gather_object((call, details, where))
    common = set.intersection(*(set(details) for _, details, _ in by_rank))
    calls = [f"{call}{_only(details, common)}" for call, details, _ in by_rank]
    if len(set(calls)) > 1:
        raise disagreement([f"{call} at {where}" for call, (_, _, where) in zip(calls, by_rank, strict=True)])


def _only(details: Sequence[str], common: set[str]) -> str:
    """The first details that not every rank has."""
    own = [detail for detail in details if detail not in common]
    shown = ", ".join(own[:_SHOWN_DIFFERENCES])
    more = f" and {len(own) - _SHOWN_DIFFERENCES} more" if len(own) > _SHOWN_DIFFERENCES else ""
    return f", with {shown}{more}" if own else ""


def _kind_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
