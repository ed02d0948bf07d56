"""Measures what the hooks of a rank add to the steps of a plain PyTorch loop, with ``--profile`` on and off.

    chrt --rr 5 python -m benchmarks.step_hooks

One process with one thread trains the tiny network of ``step_overhead`` in blocks of about a second: without hooks,
with those that count steps, and with those that measure phases too. Each block is compared with the block without hooks
beside it. The time is the process's CPU time, so that the thread that looks at the steps twenty times a second counts.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data.dataloader as loaders
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from benchmarks import step_overhead
from notebook_accel import reporting
from notebook_accel.launching.ranks import torch_hooks
from notebook_accel.launching.ranks.phases import StepClock
from notebook_accel.launching.ranks.progress import PROGRESS

EPOCHS = 40
STEPS = EPOCHS * step_overhead.BATCHES


class _Unread:
    """A reporter's connection whose other end nobody reads."""

    def send(self, body: bytes) -> None:
        """Drop an event."""


@contextlib.contextmanager
def no_hooks() -> Iterator[None]:
    """Leave torch as it is."""
    yield


@contextlib.contextmanager
def hooks(*, measures: bool) -> Iterator[None]:
    """Place the hooks of a rank and start its reporter, as a launch does.

    Args:
        measures: Whether phases are measured.
    """
    reporter, callbacks = reporting.connect(_Unread()), [*gc.callbacks]
    classes = (loaders.DataLoader, loaders._BaseDataLoaderIter)
    originals = [(each, name, vars(each)[name]) for each in classes for name in ("__iter__", "__next__", "__init__")
                 if name in vars(each)]  # fmt: skip
    originals.append((torch.autograd, "backward", torch.autograd.backward))
    handles: list[Any] = []
    clock = PROGRESS.clock = StepClock() if measures else None
    if clock is not None:
        clock.start()
    reporter.before_sample.append(PROGRESS.refresh)
    torch_hooks._patch_loaders(loaders)
    torch_hooks._patch_backward(torch.autograd)
    torch_hooks._hook_optimizers(_Registering(handles))
    try:
        yield
    finally:
        for each, name, original in originals:
            setattr(each, name, original)
        for handle in handles:
            handle.remove()
        reporter.close()
        reporting.disconnect()
        gc.callbacks[:] = callbacks


class _Registering(types.ModuleType):
    """torch's module of optimizers, which keeps the handles of what is registered."""

    def __init__(self, handles: list[Any]) -> None:
        super().__init__("optimizers")
        self.register_optimizer_step_pre_hook = lambda hook: handles.append(register_optimizer_step_pre_hook(hook))
        self.register_optimizer_step_post_hook = lambda hook: handles.append(register_optimizer_step_post_hook(hook))


def block_s(parts: step_overhead.Parts, place: Callable[[], contextlib.AbstractContextManager[None]]) -> float:
    """Return the CPU seconds of a step under these hooks, as the mean of a block."""
    with place():
        began_s = time.process_time()
        for _ in range(EPOCHS):
            step_overhead.full_loop(parts)
        return (time.process_time() - began_s) / STEPS


def main() -> None:
    """Print the cost of a step, and the medians of the blocks' ratios and differences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=31, help="paired blocks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    kinds: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
        "without hooks": no_hooks,
        "--profile off": lambda: hooks(measures=False),
        "--profile on": lambda: hooks(measures=True),
    }
    parts = step_overhead.plain(step_overhead.Setting("float32", "cpu"))
    for place in kinds.values():  # warm up
        block_s(parts, place)
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(given.blocks):
        for name in [*kinds][:: 1 if number % 2 else -1]:
            taken[name].append(block_s(parts, kinds[name]))
    base = taken["without hooks"]
    print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {given.blocks} paired blocks of {STEPS} steps")
    print(f"a step without hooks: {statistics.median(base) * 1e6:.0f} µs")
    for name in ("--profile off", "--profile on"):
        ratio = statistics.median(of / beside for of, beside in zip(taken[name], base, strict=True))
        added_us = statistics.median(of - beside for of, beside in zip(taken[name], base, strict=True)) * 1e6
        print(f"{name}: {ratio:.4f} times, {added_us:+.2f} µs a step")
    pairs = [*zip(taken["--profile on"], taken["--profile off"], strict=True)]
    added_us = statistics.median(on - off for on, off in pairs) * 1e6
    share = statistics.median(on / off for on, off in pairs) - 1
    print(f"measuring phases, on over off: {added_us:+.2f} µs a step, {share:+.2%}")


if __name__ == "__main__":
    main()
