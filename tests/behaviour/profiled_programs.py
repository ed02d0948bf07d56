"""Training programs that are profiled while they run. Run in ranks."""

from __future__ import annotations

import os
import pathlib
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import notebook_accel

_STEPS_IN_PROFILE = 20


def _model() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(8, 8)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _step(model: torch.nn.Linear, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def without_loader() -> None:
    model, optimizer = _model()
    while True:
        _step(model, optimizer, torch.ones(4, 8))
        time.sleep(0.001)


def ends_while_it_is_profiled(is_failing: bool) -> str:
    """Ends after some steps for which torch's profiler is on."""
    model, optimizer = _model()
    profiled = 0
    while True:
        for (x,) in DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=4):
            profiled += torch.autograd._profiler_enabled()
            _step(model, optimizer, x)
            if profiled == _STEPS_IN_PROFILE:
                if is_failing:
                    raise ValueError("the last step")
                return "done"


def profiles_itself() -> None:
    model, optimizer = _model()
    with torch.profiler.profile():
        while True:
            _step(model, optimizer, torch.ones(4, 8))
            time.sleep(0.01)


def line_of(mark: str) -> str:
    """The file and the number of the line with this mark."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.endswith(f"# planted: {mark}"))
    return f"{__file__}, line {number}"


def holds_memory(compiles: bool) -> None:
    """Makes 16 MiB of inputs on the GPU in each step, and outputs of twice their size."""
    model = torch.nn.Linear(8, 16).cuda()
    run = torch.compile(model, backend="eager") if compiles else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        x = torch.ones(1 << 19, 8, device="cuda")  # planted: inputs
        y = run(x)  # planted: outputs
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    while True:
        step()
        time.sleep(0.1)


def does_no_step() -> None:
    while True:
        time.sleep(0.01)


def starts_the_profiler_slowly(may_start: str) -> None:
    """The profiler starts when that file is there. Another thread reports meanwhile."""
    start = torch.profiler.profile.start

    def wait_and_start(self: torch.profiler.profile) -> None:
        notebook_accel.report(starts=1)
        while not os.path.exists(may_start):
            time.sleep(0.01)
        start(self)

    torch.profiler.profile.start = wait_and_start  # type: ignore[method-assign]
    layer = torch.nn.Linear(8, 1)
    while True:
        for x in DataLoader(torch.randn(64, 8), batch_size=8):
            layer(x).sum().backward()
            time.sleep(0.01)
