"""Seeds, and the state of every generator of random numbers that training uses."""

from __future__ import annotations

import contextlib
import enum
import itertools
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from notebook_accel.errors import ConfigError
from notebook_accel.training import collectives, process_group
from notebook_accel.training.backends.backend import Backend, all_ranks, shares_samples

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
    """Return the state of this process's generators on the host, which ``torch.load(weights_only=True)`` reads."""
    state = _on_host()
    version, words, gauss = state["python"]
    made = {**state, "python": (version, torch.tensor(words, dtype=torch.int64), gauss)}
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        made["numpy"] = (str(name), torch.tensor(keys.tolist(), dtype=torch.int64), *rest)
    return made


def _on_host() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:  # otherwise no number was drawn from it
        import numpy

        state["numpy"] = numpy.random.get_state(legacy=True)
    return state


def _set_on_host(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])


def capture(backend: Backend) -> dict[str, Any]:
    """Return the state of this rank's generators, including its device's."""
    return {**snapshot(), **backend.generator_state()}


def restore(state: dict[str, Any], backend: Backend | None = None) -> None:
    """Set the generators, with ``backend`` also the device's, to a state from ``capture`` or ``snapshot``."""
    version, words, gauss = state["python"]
    made = {**state, "python": (version, tuple(words.tolist()), gauss)}
    if "numpy" in state:
        name, keys, *rest = state["numpy"]
        made["numpy"] = (name, keys.numpy().astype("uint32"), *rest)
    _set_on_host(made)
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


def drawn_as_rank_0(
    make: Callable[[], Iterator[_T]],
    from_rank_0: Callable[[Any], Any],
    generators: Sequence[torch.Generator],
    *,
    draws_anywhere: bool,
) -> Iterator[_T]:
    """Return the items of the iterator that ``make`` makes, drawn with rank 0's random numbers on every rank.

    The first item is drawn from rank 0's global generators and from its ``generators``, as plain PyTorch does. What
    later items draw from the global ones comes from others that are seeded by rank 0's after the first item, so that it
    doesn't depend on what each rank draws in between.

    Args:
        make: Makes the iterator.
        from_rank_0: Broadcasts rank 0's argument. Every rank calls it once, or twice for one that ``draws_anywhere``.
        generators: Further generators that the iterator draws from. Each rank's get rank 0's state.
        draws_anywhere: True if ``make`` and later items may draw from the global generators too.
    """
    with _of_rank_0(from_rank_0, generators) if draws_anywhere else contextlib.nullcontext():
        items = make()

    def drawn() -> Iterator[_T]:
        with _of_rank_0(from_rank_0, generators):
            first = [*itertools.islice(items, 1)]
            state = _on_host()
        yield from first
        yield from drawn_apart(items, _seeded_by(state)) if draws_anywhere else items

    return drawn()


@contextlib.contextmanager
def _of_rank_0(from_rank_0: Callable[[Any], Any], generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Draw rank 0's random numbers in the body.

    Afterwards a global generator whose state was another one than rank 0's has that state again. All others, and
    ``generators``, continue with rank 0's.
    """
    own = _on_host()
    state, states = from_rank_0((own, [generator.get_state() for generator in generators]))
    for generator, its_state in zip(generators, states, strict=False):
        generator.set_state(its_state)
    others = {name: its_state for name, its_state in own.items() if not _are_equal(its_state, state.get(name))}
    if others:
        _set_on_host(state)
    try:
        yield
    finally:
        if others:
            _set_on_host(_on_host() | others)


def _seeded_by(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state of the generators on the host that depends on ``state`` only."""
    outside = _on_host()
    seed = zlib.crc32(repr((state["torch"].tolist(), state["python"])).encode())
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed devices too
    random.seed(seed)
    if "numpy" in outside:
        sys.modules["numpy"].random.seed(seed)
    seeded = _on_host()
    _set_on_host(outside)
    return seeded


def _are_equal(state: Any, other: Any) -> bool:
    """Return whether two states of one generator on the host are equal. ``other`` may be ``None``."""
    if not isinstance(state, tuple) or other is None:
        return other is not None and torch.equal(state, other)
    return all(bool((part == others).all()) if hasattr(part, "all") else part == others
               for part, others in zip(state, other, strict=True))  # fmt: skip


def drawn_apart(items: Iterable[_T], state: dict[str, Any] | None = None) -> Iterator[_T]:
    """Yield items that draw random numbers when they are created, without a change of the generators outside."""
    iterator, state = iter(items), state or _on_host()
    while True:
        outside = _on_host()
        _set_on_host(state)
        try:
            item = next(iterator)
        except StopIteration:
            return
        finally:
            state = _on_host()
            _set_on_host({**state, **outside})
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
