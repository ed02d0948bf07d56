"""Measures the cost of a training step through each library, as a ratio to plain PyTorch.

    python benchmarks/step_overhead.py                 # --device cuda on a GPU machine

One process with one thread, a tiny network, so that the libraries' own work shows. Blocks of all contenders
are interleaved, and each is compared with plain PyTorch's block beside it: a busy machine slows down both. The table
shows the median of these ratios, in CPU time and in wall time. Lightning Fabric takes part if it can be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import statistics
import sys
import time
import timeit
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # as everybody writes it
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import notebook_accel

BATCH_SIZE = 32
BATCHES = 64
WINDOW = 4


class Parts(NamedTuple):
    """The parts of a training loop.

    Attributes:
        model: The network.
        optimizer: The optimizer of its weights.
        loader: The batches.
        scheduler: The learning rate's schedule.
        backward: Function that computes gradients from a loss.
        window: Function that takes a micro-batch's number from 0 and returns its context.
    """

    model: Any
    optimizer: Any
    loader: Any
    scheduler: Any
    backward: Callable[[torch.Tensor], Any]
    window: Callable[[int], contextlib.AbstractContextManager[Any]]


class Setting(NamedTuple):
    """A setting, with some rows of the table.

    Attributes:
        name: The rows' name.
        device: ``"cpu"`` or ``"cuda"``.
        precision: ``"no"``, ``"bf16"`` or ``"fp16"``.
        steps: Number of micro-batches of an accumulation window.
    """

    name: str
    device: str
    precision: str = "no"
    steps: int = 1


def settings(device: str) -> list[Setting]:
    """Return the settings that are measured on a device."""
    rows = [
        Setting("float32", device),
        Setting(f"accumulation of {WINDOW}", device, steps=WINDOW),
        Setting("bf16", device, "bf16"),
    ]
    return rows if device == "cpu" else [*rows, Setting("fp16", device, "fp16")]


def materials() -> tuple[Any, Any, Any, Any]:
    """Make the model, optimizer, loader and scheduler that all contenders start with."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = BATCH_SIZE * BATCHES
    data = TensorDataset(torch.randn(samples, 64), torch.randint(0, 10, (samples,)))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    return model, optimizer, loader, LambdaLR(optimizer, lambda _: 1.0)


class _Autocast(torch.nn.Module):
    """Mixed precision as one writes it without a library."""

    def __init__(self, model: torch.nn.Module, setting: Setting) -> None:
        super().__init__()
        self.model = model
        self._device = setting.device
        self._dtype = torch.bfloat16 if setting.precision == "bf16" else torch.float16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self._device, self._dtype):
            outputs: torch.Tensor = self.model(x)
        return outputs.float()


class _Moved:
    """A loader's batches on the device."""

    def __init__(self, loader: Any, device: str) -> None:
        self._loader = loader
        self._device = device

    def __iter__(self) -> Iterator[Any]:
        for x, y in self._loader:
            yield x.to(self._device), y.to(self._device)


class _Scaled:
    """An optimizer under a loss scaler."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._optimizer = optimizer
        self.zero_grad = optimizer.zero_grad

    def step(self) -> None:
        self._scaler.step(self._optimizer)
        self._scaler.update()


class _PlainWindow:
    """Accumulation without a library: optimizer and scheduler move only where a window ends."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.is_end = True

    def begin(self, number: int) -> contextlib.AbstractContextManager[None]:
        self.is_end = (number + 1) % self._steps == 0
        return contextlib.nullcontext()


class _Gated:
    """An optimizer or scheduler that plain PyTorch, or Fabric, moves at a window's end only."""

    def __init__(self, inner: Any, window: _PlainWindow) -> None:
        self._inner = inner
        self._window = window

    def step(self) -> None:
        if self._window.is_end:
            self._inner.step()

    def zero_grad(self) -> None:
        if self._window.is_end:
            self._inner.zero_grad()


def _gated(optimizer: Any, scheduler: Any, steps: int) -> tuple[Any, Any, Callable[[int], Any]]:
    if steps == 1:
        return optimizer, scheduler, lambda _: contextlib.nullcontext()
    window = _PlainWindow(steps)
    return _Gated(optimizer, window), _Gated(scheduler, window), window.begin


def plain(setting: Setting) -> Parts:
    """Make the parts with PyTorch alone."""
    model, optimizer, loader, scheduler = materials()
    model.to(setting.device)
    if setting.device != "cpu":
        loader = _Moved(loader, setting.device)
    if setting.precision != "no":
        model = _Autocast(model, setting)
    scaler = torch.amp.GradScaler(setting.device) if setting.precision == "fp16" else None
    if scaler is not None:
        optimizer = _Scaled(optimizer, scaler)
    steps = setting.steps
    optimizer, scheduler, window = _gated(optimizer, scheduler, steps)

    def backward(loss: torch.Tensor) -> None:
        loss = loss if steps == 1 else loss / steps
        (loss if scaler is None else scaler.scale(loss)).backward()

    return Parts(model, optimizer, loader, scheduler, backward, window)


def ours(setting: Setting) -> Parts:
    """Make the parts with notebook_accel."""
    return _by_accelerator(notebook_accel.Accelerator, setting)


def theirs(setting: Setting) -> Parts:
    """Make the parts with Accelerate."""
    accelerate = importlib.import_module("accelerate")
    # Without this a process can have no second Accelerator of another precision.
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return _by_accelerator(accelerate.Accelerator, setting)


def _by_accelerator(kind: Any, setting: Setting) -> Parts:
    accelerator = kind(
        cpu=setting.device == "cpu",
        mixed_precision=setting.precision,
        gradient_accumulation_steps=setting.steps,
    )
    model, optimizer, loader, scheduler = accelerator.prepare(*materials())
    single = setting.steps == 1
    window = (lambda _: contextlib.nullcontext()) if single else (lambda _: accelerator.accumulate(model))
    return Parts(model, optimizer, loader, scheduler, accelerator.backward, window)


def fabric(setting: Setting) -> Parts:
    """Make the parts with Lightning Fabric."""
    made = importlib.import_module("lightning.fabric").Fabric(
        accelerator=setting.device,
        devices=1,
        precision={"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[setting.precision],
    )
    made.launch()
    model, optimizer, loader, scheduler = materials()
    model, optimizer = made.setup(model, optimizer)
    loader = made.setup_dataloaders(loader)
    steps = setting.steps
    optimizer, scheduler, window = _gated(optimizer, scheduler, steps)

    def backward(loss: torch.Tensor) -> None:
        made.backward(loss if steps == 1 else loss / steps)

    return Parts(model, optimizer, loader, scheduler, backward, window)


def full_loop(parts: Parts) -> None:
    """Train one epoch as a user writes it."""
    model, optimizer, loader, scheduler, backward, window = parts
    for number, (x, y) in enumerate(loader):
        with window(number):
            backward(F.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def step_only(parts: Parts, x: torch.Tensor, y: torch.Tensor) -> None:
    """Train as many steps on one batch."""
    model, optimizer, _, _, backward, window = parts
    for number in range(BATCHES):
        with window(number):
            backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()


def loader_only(parts: Parts) -> None:
    """Take one epoch's batches."""
    for _ in parts.loader:
        pass


def ratios(runs: dict[str, Callable[[], Any]], blocks: int) -> dict[str, tuple[float, float, float]]:
    """Return each contender's median ratio to the first in CPU time and in wall time, and its CPU µs a batch."""
    for run in runs.values():
        run()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    names = list(runs)
    for block in range(blocks):
        order = names if block % 2 else names[::-1]
        for name in order:
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            runs[name]()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            taken[name].append((time.thread_time() - cpu_s, time.perf_counter() - wall_s))
    baseline = taken[names[0]]
    return {
        name: (
            *(
                statistics.median(pair[i] / base[i] for pair, base in zip(of_one, baseline, strict=True))
                for i in (0, 1)
            ),
            statistics.median(cpu for cpu, _ in of_one) / BATCHES * 1e6,
        )
        for name, of_one in taken.items()
    }  # type: ignore[return-value]  # the generator has two items


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """Make a process group of one rank, so that the cost of a call shows without waiting for other ranks."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def per_call(calls: int = 2000, repeats: int = 9) -> list[tuple[str, float, float]]:
    """Return the name of each call, the µs that it adds on a group of one rank, and the limit in µs."""
    with group_of_one():
        accelerator = notebook_accel.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = accelerator.prepare(torch.nn.Linear(4, 4))
        tensor, gathered = torch.ones(8, 4), torch.empty(8, 4)

        def accumulate() -> None:
            with accelerator.accumulate(model):
                pass

        def added(call: Callable[[], Any], beside: Callable[[], Any] | None = None) -> float:
            costs = []
            for _ in range(repeats):
                cost_s = timeit.timeit(call, number=calls, timer=time.thread_time)
                if beside is not None:
                    cost_s -= timeit.timeit(beside, number=calls, timer=time.thread_time)
                costs.append(cost_s / calls * 1e6)
            return statistics.median(costs)

        all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        beside = lambda: all_gather(gathered, tensor)  # noqa: E731
        return [
            ("accumulate", added(accumulate), 10.0),
            ("gather, over all_gather", added(lambda: accelerator.gather(tensor), beside), 15.0),
            (
                "gather_for_metrics, over all_gather",
                added(lambda: accelerator.gather_for_metrics(tensor), beside),
                15.0,
            ),
        ]


def contenders() -> dict[str, Callable[[Setting], Parts]]:
    """Return the contenders that are installed, and print which aren't."""
    found: dict[str, Callable[[Setting], Parts]] = {"PyTorch": plain, "notebook_accel": ours}
    for package, make in (("accelerate", theirs), ("lightning", fabric)):
        try:
            importlib.import_module(package)
        except ImportError as error:
            print(f"!!! {package} CAN'T BE IMPORTED ({error}): it is MISSING from the table.")
        else:
            found[f"{package} {importlib.metadata.version(package)}"] = make
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=31, help="paired blocks of each row; at least 7")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    blocks = max(7, given.blocks)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # Fabric's advice about workers
    makers = contenders()
    x = torch.randn(BATCH_SIZE, 64, device=given.device)
    y = torch.randint(0, 10, (BATCH_SIZE,), device=given.device)
    width = max(map(len, makers)) + 2
    versions = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    print(f"{versions}, {given.device}, one thread, {blocks} paired blocks")
    print(f"{'ratio of CPU time (of wall time)':44}" + "".join(f"{name:>{width}}" for name in makers))
    for setting in settings(given.device):
        made = {name: make(setting) for name, make in makers.items()}
        kinds: list[tuple[str, Callable[[Parts], None]]] = [
            ("full loop", full_loop),
            ("step only", lambda parts: step_only(parts, x, y)),
        ]
        if setting.name == "float32":
            kinds.append(("loader only", loader_only))
        for kind, run in kinds:
            runs = {name: (lambda run=run, parts=parts: run(parts)) for name, parts in made.items()}
            row = ratios(runs, blocks)
            cells = [f"{cpu:.3f} ({wall:.3f})" for cpu, wall, _ in row.values()]
            label = f"{setting.name}, {kind} ({row['PyTorch'][2]:.0f} µs)"
            print(f"{label:44}" + "".join(f"{cell:>{width}}" for cell in cells), flush=True)
    print("\nµs that a call adds on a group of one rank")
    for name, cost_us, limit_us in per_call():
        print(f"{name:44}{cost_us:8.1f}   (at most {limit_us:g})")


if __name__ == "__main__":
    main()
