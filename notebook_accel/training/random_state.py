"""Seeds, and the state of every generator of random numbers that training uses."""

from __future__ import annotations

import contextlib
import enum
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from notebook_accel.errors import ConfigError
from notebook_accel.training import collectives, process_group
from notebook_accel.training.backends.backend import Backend, all_ranks, shares_samples
from notebook_accel.training.trees import leaves_of

_T = TypeVar("_T")


class RNGType(str, enum.Enum):
    """Generators of random numbers."""

    TORCH = "torch"
    CUDA = "cuda"
    XLA = "xla"
    NUMPY = "numpy"
    PYTHON = "python"
    GENERATOR = "generator"


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's and torch's generators, including those of GPUs.

    Args:
        seed: The seed.
        device_specific: Add the rank, so that ranks draw different numbers.
        deterministic: Have torch use deterministic algorithms where it has them.
    """
    if device_specific:
        seed += process_group.rank_place().rank
    _seed_host(seed)
    process_group.seed_device(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def _seed_host(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed % 2**32)  # NumPy takes no larger seeds


def snapshot() -> dict[str, Any]:
    """Return the state of this process's generators on the host, in the form of ``to_loadable``."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:  # otherwise no number was drawn from it
        import numpy

        state["numpy"] = numpy.random.get_state(legacy=True)
    return to_loadable(state)


def to_loadable(state: dict[str, Any]) -> dict[str, Any]:
    """Return the generators' own states in a form that ``torch.load(weights_only=True)`` reads."""
    version, words, gauss = state["python"]
    made = {**state, "python": (version, torch.tensor(words, dtype=torch.int64), gauss)}
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        made["numpy"] = (str(name), torch.tensor(keys.tolist(), dtype=torch.int64), *rest)
    return made


def capture(backend: Backend) -> dict[str, Any]:
    """Return the state of this rank's generators, including its device's."""
    return {**snapshot(), **backend.generator_state()}


def restore(state: dict[str, Any], backend: Backend | None = None) -> None:
    """Set the generators, with ``backend`` also the device's, to a state from ``capture`` or ``snapshot``."""
    torch.set_rng_state(state["torch"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), *rest))
    if backend is not None:
        backend.set_generator_state(state)


def draw_afresh(saved: dict[str, Any], rank: int, backend: Backend) -> None:
    """Seed this rank's generators from its number and a saved rank's state, which ``capture`` returned.

    So a rank that didn't exist when a checkpoint was saved draws numbers of its own, and the same ones each time the
    checkpoint is loaded.
    """
    seed = zlib.crc32(bytes(saved["torch"].tolist()), rank)
    _seed_host(seed)
    backend.seed(seed)


def check_rng_types(types: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of generators, as ``synchronize`` takes them; raise ``ConfigError`` for an unknown one."""
    names = tuple(str(getattr(kind, "value", kind)) for kind in types)
    known = [kind.value for kind in RNGType]
    for name in names:
        if name not in known:
            raise ConfigError(f"rng_types has {name!r}.", fix=f"some of {', '.join(map(repr, known))}")
    return names


def synchronize(backend: Backend, types: Iterable[str], generator: torch.Generator | None = None) -> None:
    """Copy rank 0's state of the named generators to every rank."""
    backend = all_ranks(backend)
    if backend.place.world_size == 1:
        return
    own = capture(backend)
    if generator is not None:
        own["generator"] = generator.get_state()
    from_rank_0 = collectives.broadcast_object(backend, {name: own[name] for name in types if name in own})
    if generator is not None and "generator" in from_rank_0:
        generator.set_state(from_rank_0.pop("generator"))
    restore({**own, **from_rank_0}, backend)


def agree(backend: Backend) -> None:
    """Copy the random state of the first of the ranks that work on the same samples, such as for dropout."""
    if shares_samples(backend):
        by_group = collectives.gather_object(backend, [capture(backend)])
        restore(by_group[backend.place.rank], backend)


@contextlib.contextmanager
def of_rank_0(from_rank_0: Callable[[Any], Any]) -> Iterator[None]:
    """Draw rank 0's random numbers in the body. A rank whose numbers were others continues with its own afterwards.

    ``from_rank_0`` broadcasts rank 0's argument.
    """
    own = snapshot()
    state = from_rank_0(own)
    if _numbers_of(state) == _numbers_of(own):
        yield
        return
    restore(state)
    try:
        yield
    finally:
        restore(own)


def _numbers_of(state: dict[str, Any]) -> list[Any]:
    """Return a snapshot in a form that can be compared."""
    return [leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves_of(state)]


def drawn_apart(items: Iterable[_T]) -> Iterator[_T]:
    """Yield items that draw random numbers when they are created, without a change of the generators outside."""
    iterator, state = iter(items), snapshot()
    while True:
        outside = snapshot()
        restore(state)
        try:
            item = next(iterator)
        except StopIteration:
            return
        finally:
            state = snapshot()
            restore({**state, **outside})
        yield item


def synchronize_rng_states(rng_types: Iterable[Any], generator: torch.Generator | None = None) -> None:
    """Copy rank 0's state of some generators to every rank.

    Args:
        rng_types: Some of ``"torch"``, ``"cuda"``, ``"xla"``, ``"numpy"``, ``"python"`` and ``"generator"``.
        generator: The generator that ``"generator"`` names.

    Raises:
        ConfigError: There is no such generator.
    """
    synchronize(process_group.current(), check_rng_types(rng_types), generator)


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Copy rank 0's state of one generator to every rank, as ``synchronize_rng_states``."""
    synchronize_rng_states([] if rng_type is None else [rng_type], generator)
