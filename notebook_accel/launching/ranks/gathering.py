"""Whole copies of sharded tensors, for values that go back to the notebook.

Gathering is a collective. Ranks come to the end of their code at different times, and may have different values there.
So each rank first publishes in the store which sharded tensors its values have. A rank whose values have none goes on.
The others wait for all ranks, and decide by the same facts which tensors they gather, one after the other. The agent
stops the ranks that wait for a failed one.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from notebook_accel import host_memory, torch_internals
from notebook_accel.errors import PayloadError
from notebook_accel.formatting import format_size
from notebook_accel.launching.ranks import store
from notebook_accel.payload import serialization

_LOOK_PERIOD_S = 0.02
_COPIES = 2  # the gathered copy, and the copy in the file for the notebook
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_AFTER_THE_END = "all ranks have to take part, and their process group has ended"
_FIX = 'accelerator.save_model(model, "folder") in the code that the ranks run; or load what save_state has saved'


class _Offer(msgspec.Struct, frozen=True):
    """The sharded tensors in the values of one rank.

    Attributes:
        host: The rank's machine.
        free_bytes: The memory that is free there.
        found: A description of each tensor, by the names of the values.
        ranks: The numbers of the ranks that have shares of a value.
        sizes_bytes: Sizes of the whole tensors that the rank keeps, by their numbers, for each value that it keeps.
    """

    host: str
    free_bytes: int
    found: dict[str, list[str]]
    ranks: dict[str, list[int]]
    sizes_bytes: dict[str, dict[int, int]]


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Offer)


class Gathered:
    """The whole copies.

    Attributes:
        wholes: The copies, on the CPU, by the ids of the sharded tensors.
        refused: Errors for the values that can't be sent, by name.
    """

    def __init__(self) -> None:
        self.wholes: dict[int, Any] = {}
        self.refused: dict[str, PayloadError] = {}


def gather(
    values: Mapping[str, Any],
    *,
    kept: Collection[str],
    occasion: str,
    origins: serialization.Origins = (),
) -> Gathered:
    """Gather the sharded tensors of some values. All ranks of the process group call it.

    Args:
        values: The values by name, also those that only other ranks send.
        kept: The names of the values that this rank sends.
        occasion: A key that is the same on all ranks, and differs from one call to the next.
        origins: The same as for ``serialization.pickle_by_value``.
    """
    gathered = Gathered()
    common = _store()
    if common is None:  # without a group nothing is sharded
        return gathered
    sharded = _find(values, origins)
    _publish(common, occasion, _offer(sharded, kept))
    if not sharded:
        return gathered
    distributed: Any = sys.modules["torch.distributed"]
    if not distributed.is_initialized():
        gathered.refused = {name: _error(name, _AFTER_THE_END) for name in sharded if name in kept}
        return gathered
    offers = _await(common, occasion, distributed.get_world_size())
    own = int(distributed.get_rank())
    too_large = _too_large(offers)
    for name in sorted(sharded):
        why = _difference(name, own, offers) or too_large.get(name, "")
        if why and name in kept:
            gathered.refused[name] = _error(name, why)
        for tensor in () if why else sharded[name]:
            whole = _whole(tensor)
            if name in kept:
                gathered.wholes[id(tensor)] = whole
    return gathered


def refuse(values: Mapping[str, Any], why: str, origins: serialization.Origins = ()) -> dict[str, PayloadError]:
    """Return an error for each value with sharded tensors, for ranks that can't gather them."""
    return {name: _error(name, why) for name in _find(values, origins)}


def _error(name: str, why: str) -> PayloadError:
    label = f'name "{name}"' if name else "the result"
    return PayloadError(f"{label} is sharded over the ranks, and can't be sent whole: {why}.", path=label, fix=_FIX)


def _find(values: Mapping[str, Any], origins: serialization.Origins) -> dict[str, list[Any]]:
    """Return the sharded tensors of each value that has any."""
    if "torch.distributed.tensor" not in sys.modules:
        return {}
    found = {
        name: serialization.find_sharded(value, origins=origins)
        for name, value in values.items()
        if type(value) not in _PLAIN
    }
    return {name: tensors for name, tensors in found.items() if tensors}


def _offer(sharded: Mapping[str, list[Any]], kept: Collection[str]) -> _Offer:
    return _Offer(
        host=socket.gethostname(),
        free_bytes=host_memory.available_bytes() if sharded else 0,
        found={name: [_described(tensor) for tensor in tensors] for name, tensors in sharded.items()},
        ranks={name: sorted({rank for t in tensors for rank in _ranks(t)}) for name, tensors in sharded.items()},
        sizes_bytes={
            name: {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}
            for name, tensors in sharded.items()
            if name in kept
        },
    )


def _ranks(tensor: Any) -> list[int]:
    ranks: list[int] = tensor.device_mesh.mesh.flatten().tolist()
    return ranks


def _described(tensor: Any) -> str:
    # Not the ranks of the mesh, since each rank sees its own part of a mesh with several dimensions.
    return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.placements} {tuple(tensor.device_mesh.shape)}"


def _key(occasion: str, rank: int) -> str:
    return f"notebook_accel_values/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{occasion}/{rank}"


def _store() -> Any:
    """Return the store that the ranks share, ``None`` if they have never met."""
    distributed: Any = sys.modules.get("torch.distributed")
    if store.latest() is None and distributed is not None and distributed.is_initialized():
        return torch_internals.default_store()  # the ranks have met without our store
    return store.latest()


def _publish(common: Any, occasion: str, offer: _Offer) -> None:
    try:
        common.set(_key(occasion, int(os.environ["RANK"])), _encode(offer))
    except RuntimeError:  # the rank that serves the store is gone, and so will be the run
        if offer.found:
            raise


def _await(common: Any, occasion: str, world_size: int) -> list[_Offer]:
    """Return the offers of all ranks, in order of rank."""
    keys = [_key(occasion, rank) for rank in range(world_size)]
    while not common.check(keys):  # a wait in C++ would block interrupts
        time.sleep(_LOOK_PERIOD_S)
    return [_decoder.decode(common.get(key)) for key in keys]


def _difference(name: str, own: int, offers: list[_Offer]) -> str:
    """Return how another rank with shares of a value differs, so that it can't be gathered; else ``""``.

    Either all ranks that share a value find a difference, or none does.
    """
    mine = offers[own]
    for rank in mine.ranks[name]:
        if offers[rank].found.get(name) != mine.found[name]:
            has = "other sharded tensors there" if name in offers[rank].found else "nothing sharded there"
            return f"rank {own} and rank {rank} differ, rank {rank} has {has}"
    return ""


def _too_large(offers: list[_Offer]) -> dict[str, str]:
    """Return the values that don't fit into a machine's memory beside the earlier values, each with the reason."""
    refused: dict[str, str] = {}
    taken: dict[str, dict[tuple[int, int], int]] = {}
    for name in sorted({name for offer in offers for name in offer.found}):
        wanted = {host: dict(sizes) for host, sizes in taken.items()}
        for rank, offer in enumerate(offers):
            sizes = offer.sizes_bytes.get(name, {})
            wanted.setdefault(offer.host, {}).update({(rank, tensor): size for tensor, size in sizes.items()})
        for host, all_sizes in wanted.items():
            free_bytes = min((of.free_bytes for of in offers if of.host == host and of.found), default=0)
            needed_bytes = sum(all_sizes.values())
            if all_sizes and _COPIES * needed_bytes > free_bytes:
                refused[name] = (
                    f"with what is sent beside it, it takes {format_size(needed_bytes)} on {host}, twice "
                    f"that while it is copied, and {format_size(free_bytes)} is free"
                )
        if name not in refused:
            taken = wanted
    return refused


def _whole(tensor: Any) -> Any:
    """Return a whole copy on the CPU. All ranks with shares call it. On a GPU there is one whole tensor at a time."""
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        on_device = tensor.detach().to(tensor.device_mesh.device_type)  # the share may be on the host
        return on_device.full_tensor().cpu()
