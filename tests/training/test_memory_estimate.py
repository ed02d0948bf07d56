"""The estimate of a model's memory is what ranks then hold."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin, MemoryEstimate, estimate_memory
from notebook_accel.errors import ConfigError
from tests.training.ranks import caught_warnings, on_ranks


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 128)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(128, 128) for _ in range(4)])
        self.first.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).relu()
        return x


def held_bytes(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2)
def test_it_is_what_ranks_hold(sharded: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model = Blocks()
    if sharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    state = [value for values in optimizer.state.values() for value in values.values()]
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    found = [sum(map(held_bytes, tensors)) for tensors in (model.parameters(), gradients, state)]
    accelerator.end_training()
    estimate = estimate_memory(Blocks, num_processes=2, sharded=sharded)
    gradient_bytes = estimate.gradient_bytes // (1 if sharded else 2)  # without DDP there are no buckets
    assert found == pytest.approx([estimate.parameter_bytes, gradient_bytes, estimate.optimizer_bytes], rel=0.02)


def test_what_moves_the_estimate() -> None:
    model = Blocks()
    whole = estimate_memory(model)
    assert whole.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert estimate_memory(model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)).optimizer_bytes == 0
    # Its step reads numbers, which meta tensors don't have.
    assert 0 < estimate_memory(model, optimizer=torch.optim.Adafactor).optimizer_bytes < whole.optimizer_bytes / 10
    sequential = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    assert estimate_memory(sequential, num_processes=2, sharded=True).gathered_bytes == 2 * 4 * (8 * 8 + 8)
    at_once = FullyShardedDataParallelPlugin(auto_wrap_policy="no_wrap")
    whole_bytes = estimate_memory(sequential, num_processes=2, sharded=True, fsdp_plugin=at_once).gathered_bytes
    assert whole_bytes == 4 * 2 * 4 * (8 * 8 + 8)
    full, half = (estimate_memory(model, num_processes=2, sharded=True, mixed_precision=p) for p in ("no", "bf16"))
    assert full.gathered_bytes == 2 * half.gathered_bytes == 2 * 4 * (128 * 128 + 128)
    assert (whole.total_bytes, estimate_memory(model, num_processes=2).gradient_bytes) == (
        whole.parameter_bytes + whole.gradient_bytes + whole.optimizer_bytes,
        2 * whole.gradient_bytes,
    )


def test_it_says_the_sizes() -> None:
    estimate = MemoryEstimate(
        parameters=7_200_000_000, num_processes=2, is_sharded=True, parameter_bytes=14 << 30, gradient_bytes=14 << 30,
        optimizer_bytes=0, gathered_bytes=1 << 30,
    )  # fmt: skip
    assert str(estimate) == (
        "7.2 B parameters, sharded over 2 ranks: about 29 GiB a rank and the activations "
        "(parameters 14 GiB, gradients 14 GiB, gathered blocks 1.0 GiB)"
    )


@pytest.mark.parametrize(("arguments", "message"), [
    ({"mixed_precision": "fp8"}, "mixed_precision is 'fp8'"),
    ({"num_processes": 0}, "num_processes is 0"),
    ({"optimizer": torch.optim.LBFGS}, "its step needs more than shapes"),
])  # fmt: skip
def test_what_cannot_be_estimated_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        estimate_memory(Blocks(), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("settings", "device_memory", "words"), [
    ({"num_processes": 2}, "1GiB", "Of 1.0 GiB that leaves 1023 MiB"),
    ({"num_processes": 2}, "1000KiB", "more than 1000 KiB: it fits sharded with cpu_offload=True, or sharded (--fsdp)"),
    ({"num_processes": 2, "sharded": True}, "400KiB", "400 KiB: it fits with cpu_offload=True, or on 4 ranks"),
    ({}, "300KiB", "300 KiB: it fits sharded (--fsdp) on 8 ranks"),
    ({"num_processes": 2, "sharded": True}, 1000, "1 KiB: nothing that was tried makes it fit"),
])  # fmt: skip
def test_it_says_what_makes_a_model_fit(settings: dict[str, Any], device_memory: int | str, words: str) -> None:
    estimate = estimate_memory(Blocks, **settings, device_memory=device_memory)
    assert words in str(estimate)


def test_what_it_advises_fits() -> None:
    """The advice for a device of any size is true of an estimate for that, and for no smaller number of ranks."""
    for size in range(150_000, 1_300_000, 100_000):
        advised = re.search(r"on (\d+) ranks", str(estimate_memory(Blocks, num_processes=2, device_memory=size))[60:])
        if advised is not None:
            ranks = int(advised[1])
            assert estimate_memory(Blocks, num_processes=ranks, sharded=True).total_bytes <= size
            assert ranks == 2 or estimate_memory(Blocks, num_processes=ranks // 2, sharded=True).total_bytes > size


def test_a_device_memory_that_is_no_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="device_memory is 'plenty'"):
        estimate_memory(Blocks, device_memory="plenty")


@pytest.mark.parametrize("missing_bytes", [0, 1000])
@on_ranks(2)
def test_a_model_that_will_not_fit_is_named_before_it_is_sharded(missing_bytes: int) -> None:
    """A CPU doesn't say how much memory it has."""
    needed = estimate_memory(Blocks, num_processes=2, sharded=True).total_bytes
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model = Blocks()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with pytest.MonkeyPatch.context() as patch, caught_warnings() as caught:
        patch.setattr(accelerator._backend, "memory", lambda: lambda: (0, needed - missing_bytes))
        accelerator.prepare(model, optimizer)
    said = [str(warning.message) for warning in caught if "may not fit" in str(warning.message)]
    assert len(said) == (missing_bytes > 0 and accelerator.is_main_process)
    for text in said:
        assert text.startswith("Blocks may not fit: ")
        assert "sharded over 2 ranks" in text and "it fits with cpu_offload=True, or on 4 ranks" in text
