"""Random numbers in ranks: alike until training begins, so that splits of the data agree, and then each rank's own.

A generator that the program has seeded itself is left alone. The workers of a loader differ by rank from the start,
unless the dataset is a stream, whose ranks may have to draw one order and take their shares of it.

This module never imports torch.
"""

from __future__ import annotations

import functools
import random
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from notebook_accel import reporting
from notebook_accel.environment import RankPlace

_rank = 0  # this rank's number among several


def seed_alike(nonce: int, place: RankPlace) -> None:
    """Seed the random generators, alike in all ranks of a run and differently in each run, until training begins.

    A fork has the state of the template's generators, so that without new seeds every run would draw the same numbers.
    Ranks with different numbers would split a dataset differently into training and validation parts.
    """
    global _rank
    _rank = place.rank
    own = nonce if place.local_world_size == place.world_size else 0  # other nodes have other payloads
    seed = zlib.crc32(f"{own} {place.master_addr} {place.master_port}".encode())
    by_rank = zlib.crc32(f"{seed} {place.rank}".encode())
    generators = install()
    for seed_it, _ in generators:
        seed_it(seed)
    seeders = [seed_if_unseeded for _, seed_if_unseeded in generators]
    torch = sys.modules.get("torch")
    if torch is not None:
        generator = torch.default_generator
        generator.manual_seed(seed)
        seeders.append(lambda by_rank: generator.initial_seed() == seed and generator.manual_seed(by_rank))
    if place.world_size > 1:
        reporting.reporter().at_training += [functools.partial(seeder, by_rank) for seeder in seeders]


def worker_seed(loader: Any) -> int:
    """Return a number of this rank for its loaders' workers, whose generator may be the same on all ranks."""
    # A prepared loader knows this rank's place among those that read different samples.
    return int(getattr(getattr(loader, "shard", None), "process_index", _rank))


@functools.cache
def install() -> Sequence[tuple[Callable[[int], object], Callable[[int], object]]]:
    """Watch the global generators. Return a function that seeds each, and one that does unless the program has."""
    found = [_watched((random, random._inst), "seed", "setstate", random.getstate)]
    numpy = sys.modules.get("numpy")  # a kernel that forks need not have it
    if numpy is not None:
        found.append(_watched((numpy.random,), "seed", "set_state", numpy.random.get_state))
    return found


def _watched(
    holders: Sequence[Any], seed: str, set_state: str, get_state: Callable[[], Any]
) -> tuple[Callable[[int], object], Callable[[int], object]]:
    """Return a function that seeds a generator, and one that does unless the program has changed its state by then.

    ``holders`` are the module, and the object that notebook functions such as ``random.seed`` are methods of.
    ``torch.compile`` restores a state that hasn't changed, which doesn't count.
    """
    originals, is_seeded = {name: getattr(holders[0], name) for name in (seed, set_state)}, False

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_seeded
            before = "" if is_seeded else repr(get_state())
            original(*args, **kwargs)
            is_seeded = is_seeded or repr(get_state()) != before

        return call

    replaced = {name: noting(original) for name, original in originals.items()}
    for holder in holders:
        vars(holder).update(replaced)

    def begin(value: int) -> None:
        nonlocal is_seeded
        originals[seed](value)
        is_seeded = False

    def reseed(by_rank: int) -> None:
        for holder in holders:
            vars(holder).update({name: originals[name] for name in replaced if getattr(holder, name) is replaced[name]})
        if not is_seeded:
            originals[seed](by_rank)

    return begin, reseed
