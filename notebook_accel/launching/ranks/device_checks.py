"""The programs of ``doctor --trial``, which run in ranks as a user's would, and check their devices.

Each check returns a note for the report. An error ends that check alone, so that the others still tell something.
"""

from __future__ import annotations

import importlib
import os
import resource
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

_MIB = 1 << 20
_STEPS = 30  # fp16's loss scaling may skip the first ones
_MOST_TEXT = 300


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a check on one rank.

    Attributes:
        name: The check's name.
        seconds: Its duration.
        note: What it found, in words.
        error: The type and the first line of its error; empty if it went well.
    """

    name: str
    seconds: float
    note: str = ""
    error: str = ""


def alone() -> list[Outcome]:
    """Check this rank's device, without other ranks."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    on_gpu = importlib.import_module("torch").cuda.is_available() and not _is_on_cpu()
    checks: dict[str, Callable[[], str]] = {"memory": _memory, "fp32 step": lambda: _step("no")}
    if on_gpu:
        checks |= {"fp16 step": lambda: _step("fp16"), "bf16 step": _bf16_step, "loader's copies": _copies}
    else:
        checks["bf16 step"] = _bf16_step
    return _outcomes({**checks, "workers": _workers, "peak memory": _peak})


def together() -> list[Outcome]:
    """Check that this rank and the others work together."""
    return _outcomes({"meeting": _meeting, "all_reduce": _all_reduce, "step together": lambda: _step("no")})


def add_ranks() -> float:
    """Return the sum of ones over the ranks."""
    accelerator = _accelerator()
    torch = importlib.import_module("torch")
    return float(accelerator.reduce(torch.ones(1, device=accelerator.device), "sum"))


def _outcomes(checks: Mapping[str, Callable[[], str]]) -> list[Outcome]:
    found = []
    for name, check in checks.items():
        began_s = time.perf_counter()
        note = error = ""
        try:
            note = check()
        except Exception as raised:  # noqa: BLE001 - whatever a device, its driver or a library raises
            text = " ".join(str(raised).split())  # NCCL's reason stands in a later line
            error = f"{type(raised).__name__}: {text[:_MOST_TEXT]}"
        found.append(Outcome(name, time.perf_counter() - began_s, note, error))
    return found


def _accelerator(precision: str = "no") -> Any:
    return importlib.import_module("notebook_accel").Accelerator(mixed_precision=precision)


def _is_on_cpu() -> bool:
    return bool(_accelerator().device.type == "cpu")


def _synchronize(device: Any) -> None:
    if device.type == "cuda":
        importlib.import_module("torch").cuda.synchronize(device)


def _memory() -> str:
    torch, device = importlib.import_module("torch"), _accelerator().device
    written = torch.arange(16 * _MIB, dtype=torch.float32, device=device)
    if float(written[-1]) != 16 * _MIB - 1:
        raise RuntimeError("the device returns other numbers than were written")
    free = ""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free = f" of {properties.total_memory / 2**30:.1f} GiB on a {properties.name}"
    return f"64 MiB{free}"


def _step(precision: str) -> str:
    """Train a small network for some steps, and return the duration of the last one."""
    torch, accelerator = importlib.import_module("torch"), _accelerator(precision)
    torch.manual_seed(0)
    x, y = torch.randn(64, 256, device=accelerator.device), torch.randint(0, 10, (64,), device=accelerator.device)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses, took_s = [], 0.0
    for _ in range(_STEPS):
        began_s = time.perf_counter()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        _synchronize(accelerator.device)
        took_s = time.perf_counter() - began_s
        losses.append(float(loss.detach()))
    if not losses[-1] < losses[0]:
        raise RuntimeError(f"the loss doesn't fall: {losses[0]:.3f}, and after {_STEPS} steps {losses[-1]:.3f}")
    if accelerator.num_processes > 1:
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        if float(accelerator.reduce(weights, "mean").sub(weights).abs().max()) > 1e-5:
            raise RuntimeError("the ranks' weights differ after a step")
    accelerator.free_memory()
    return f"{1000 * took_s:.1f} ms"


def _bf16_step() -> str:
    torch = importlib.import_module("torch")
    device, took = _accelerator().device, _step("bf16")
    is_emulated = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    return f'{took}; this GPU emulates it: use mixed_precision="fp16"' if is_emulated else took


def _copies() -> str:
    """Compare a prepared loader's copies, made during backward passes, with plain ones; return both durations."""
    torch, accelerator = importlib.import_module("torch"), _accelerator()
    data = torch.arange(16 * 2 * _MIB, dtype=torch.float32).reshape(16, -1)
    loader = torch.utils.data.DataLoader(data, pin_memory=True)
    weight = torch.ones(1, device=accelerator.device, requires_grad=True)

    def took_s(batches: Any) -> float:
        began_s = time.perf_counter()
        for number, batch in enumerate(batches):
            on_device = batch.to(accelerator.device)
            accelerator.backward((on_device * weight).mean())
            if not torch.equal(on_device.cpu(), data[number : number + 1]):
                raise RuntimeError("a batch arrives with other numbers")
        return time.perf_counter() - began_s

    plain_s, streamed_s = took_s(loader), took_s(accelerator.prepare(loader))
    return f"{1000 * streamed_s:.0f} ms for 128 MiB, and {1000 * plain_s:.0f} ms by plain copies"


def _workers() -> str:
    """Have worker processes send batches through shared memory."""
    torch = importlib.import_module("torch")
    loader = torch.utils.data.DataLoader(torch.ones(8, 2 * _MIB), batch_size=1, num_workers=2)
    if sum(float(batch.sum()) for batch in loader) != 8 * 2 * _MIB:
        raise RuntimeError("batches arrive with other numbers")
    room = os.statvfs("/dev/shm")
    return f"{room.f_bavail * room.f_frsize / 2**30:.1f} GiB free in /dev/shm"


def _peak() -> str:
    torch, device = importlib.import_module("torch"), _accelerator().device
    if device.type == "cuda":
        return f"{torch.cuda.max_memory_allocated(device) / _MIB:.0f} MiB on the device"
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"


def _meeting() -> str:
    accelerator, distributed = _accelerator(), importlib.import_module("torch.distributed")
    if not distributed.is_initialized() and accelerator.device.type == "cuda":
        return _nccl_alone(accelerator.device)
    backend = distributed.get_backend() if distributed.is_initialized() else "no group"
    if backend == "nccl":
        torch = importlib.import_module("torch")
        backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}, CUDA {torch.version.cuda}"
    return f"{accelerator.num_processes} {'rank' if accelerator.num_processes == 1 else 'ranks'}, {backend}"


def _nccl_alone(device: Any) -> str:
    """Sum a tensor over a group of one rank by NCCL, which a run on a single GPU doesn't use."""
    torch, distributed = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        ones = torch.ones(1, device=device)
        distributed.all_reduce(ones)
        return f"1 rank, by NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}: {float(ones):g}"
    finally:
        distributed.destroy_process_group()


def _all_reduce() -> str:
    """Sum a tensor over the ranks, and return the speed of the second time."""
    torch, accelerator = importlib.import_module("torch"), _accelerator()
    tensor, took_s = torch.ones(4 * _MIB, device=accelerator.device), 0.0
    for _ in range(2):
        began_s = time.perf_counter()
        summed = accelerator.reduce(tensor, "sum")
        _synchronize(accelerator.device)
        took_s = time.perf_counter() - began_s
    if float(summed[-1]) != accelerator.num_processes:
        raise RuntimeError(f"the sum of ones over the ranks is {float(summed[-1]):g}")
    return f"16 MiB in {1000 * took_s:.1f} ms"
