"""Sharded models on two GPUs: precision, clipping, the host's memory, checkpoints, and what is gathered.

Copies and shares of models that also have parts need four.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody writes it

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin
from notebook_accel.launching.ranks import gathering
from notebook_accel.utils import set_seed
from tests.gpu.test_gpu import gpus
from tests.training import ranks, sharded_programs
from tests.training.sharded_programs import SHADES, Case, Writer, digits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(gpus() < 2, reason="NOT TESTED: no two NVIDIA GPUs on this machine"),
]
_STEPS = 20
_DEADLINE_S = 200.0


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[ranks.Ranks]:
    with ranks.running(2) as running:
        yield running


def train(settings: dict[str, Any] | None, precision: str, *, folder: str = "", stop: int = _STEPS) -> Any:
    """Train on the digits, one half of each batch on each rank.

    Args:
        settings: The plugin's settings, ``None`` for a whole model.
        precision: The ``Accelerator``'s.
        folder: Go on from the checkpoint in this folder, or save one there at the step ``stop``.
        stop: The last step.

    Returns:
        The ranks' mean losses by step, the norms before clipping, and the kinds of devices of parameters and state.
    """
    set_seed(0)
    plugin = None if settings is None else FullyShardedDataParallelPlugin(**settings)
    accelerator = Accelerator(mixed_precision=precision, fsdp_plugin=plugin)
    model = Writer()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    net, optimizer = accelerator.prepare(model, optimizer)
    samples = digits()[accelerator.process_index :: 2].to(accelerator.device)
    begin = 0
    if folder and os.path.isdir(folder):
        accelerator.load_state(folder)
        begin, stop = stop, _STEPS
    losses, norms = [], []
    for step in range(begin, stop):
        batch = samples[16 * step : 16 * (step + 1)]
        logits = net(batch[:, :-1])
        assert logits.dtype is torch.float32 and logits.shape[-1] == SHADES
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(net.parameters(), 0.2)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    if folder and not begin:
        accelerator.save_state(folder)
    learning = [p for p in net.parameters() if p.requires_grad]
    places = {p.device.type for p in learning} | {optimizer.state[p]["exp_avg"].device.type for p in learning}
    dtypes = {str(p.dtype) for p in learning}
    accelerator.end_training()
    return losses, norms, places, dtypes


@pytest.mark.parametrize(("precision", "tolerance"), [("no", 1e-4), ("bf16", 0.05)])
def test_losses_and_norms_are_those_of_whole_models(two_gpus: ranks.Ranks, precision: str, tolerance: float) -> None:
    whole = two_gpus.run(train, None, precision, deadline_s=_DEADLINE_S)
    sharded = two_gpus.run(train, {}, precision, deadline_s=_DEADLINE_S)
    for (losses, norms, places, dtypes), (of_whole, norms_of_whole, _, _) in zip(sharded, whole, strict=True):
        assert losses == pytest.approx(of_whole, abs=tolerance)
        assert norms == pytest.approx(norms_of_whole, rel=0.05, abs=tolerance)
        assert (places, dtypes) == ({"cuda"}, {"torch.float32"})
        assert losses[-1] < losses[0]


def test_shares_that_are_kept_on_the_host_change_no_number(two_gpus: ranks.Ranks) -> None:
    """Their norm is reduced by gloo, and the gathered blocks come from the host by NCCL."""
    on_gpu = two_gpus.run(train, {}, "no", deadline_s=_DEADLINE_S)
    on_host = two_gpus.run(train, {"cpu_offload": True}, "no", deadline_s=_DEADLINE_S)
    for (losses, norms, places, _), (expected, expected_norms, _, _) in zip(on_host, on_gpu, strict=True):
        assert losses == pytest.approx(expected, abs=1e-4)
        assert norms == pytest.approx(expected_norms, abs=1e-3)
        assert places == {"cpu"}


@pytest.mark.parametrize("settings", [{}, {"cpu_offload": True}, {"state_dict_type": "full_state_dict"}])
def test_training_goes_on_from_a_checkpoint(
    two_gpus: ranks.Ranks, tmp_path: pathlib.Path, settings: dict[str, Any]
) -> None:
    folder = str(tmp_path / "saved")
    undisturbed = two_gpus.run(train, settings, "no", deadline_s=_DEADLINE_S)
    for stop, part in ((_STEPS // 2, slice(_STEPS // 2)), (_STEPS // 2, slice(_STEPS // 2, None))):
        found = two_gpus.run(train_part, settings, folder, stop, deadline_s=_DEADLINE_S)
        for (losses, *_), (expected, *_) in zip(found, undisturbed, strict=True):
            assert losses == pytest.approx(expected[part], abs=1e-4)


def train_part(settings: dict[str, Any], folder: str, stop: int) -> Any:
    """Train the first or the second part: the second if there is a checkpoint."""
    return train(settings, "no", folder=folder, stop=stop)


def gather_whole(settings: dict[str, Any]) -> Any:
    """Gather a model of 16 equal blocks in both ways. Return peaks, in models, and whether all is right."""
    set_seed(0)
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**settings))
    model = torch.nn.Sequential(torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    net = accelerator.prepare(model)
    bytes_of_all = sum(weight.numel() * weight.element_size() for weight in expected)
    peaks, are_right = [], []

    def measured(collect: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        begun = torch.cuda.memory_allocated()
        wholes = collect()
        peaks.append((torch.cuda.max_memory_allocated() - begun) / bytes_of_all)
        pairs = list(zip(wholes, expected, strict=True)) if wholes else []
        are_right.append(all(value.device.type == "cpu" and torch.equal(value, weight) for value, weight in pairs))

    measured(lambda: list(accelerator.get_state_dict(net).values()))

    def pulled() -> list[Any]:
        kept = ("net",) if accelerator.is_main_process else ()
        gathered = gathering.gather({"net": net}, kept=kept, occasion=str(settings))
        assert not gathered.refused
        return list(gathered.wholes.values())

    measured(pulled)
    accelerator.end_training()
    return peaks, are_right


@pytest.mark.parametrize("settings", [{}, {"cpu_offload": True}])
def test_no_gpu_ever_holds_the_whole_model(two_gpus: ranks.Ranks, settings: dict[str, Any]) -> None:
    for peaks, are_right in two_gpus.run(gather_whole, settings, deadline_s=_DEADLINE_S):
        assert are_right == [True, True]
        assert max(peaks) < 0.3  # one weight of 16, its share, and what NCCL needs to gather it


@pytest.fixture(scope="module")
def four_gpus() -> Iterator[ranks.Ranks]:
    with ranks.running(4) as running:
        yield running


def divided(on: ranks.Ranks, tmp_path: pathlib.Path, parallel: dict[str, int]) -> None:
    """Check that a model whose ranks divide the work trains as a whole one, and goes on from a checkpoint."""
    case = Case(cpu=False, groups=True, parallel=parallel)
    whole = Case(cpu=False, groups=True, sharded=False)
    expected = on.run(sharded_programs.losses, whole, _STEPS, deadline_s=_DEADLINE_S)
    for losses in on.run(sharded_programs.losses, case, _STEPS, deadline_s=_DEADLINE_S):
        assert losses == pytest.approx(expected[0], abs=1e-4)
    folder = str(tmp_path / "saved")
    (_, undisturbed), *_ = on.run(sharded_programs.saved, folder, case, deadline_s=_DEADLINE_S)
    for _, resumed in on.run(sharded_programs.loaded, folder, case, deadline_s=_DEADLINE_S):
        assert resumed == pytest.approx(undisturbed, abs=1e-4)


def test_parts_on_two_gpus(two_gpus: ranks.Ranks, tmp_path: pathlib.Path) -> None:
    divided(two_gpus, tmp_path, {"tp_size": 2})


@pytest.mark.skipif(gpus() < 4, reason="NOT TESTED: no four NVIDIA GPUs on this machine")
@pytest.mark.parametrize("parallel", [
    {"dp_shard_size": 2, "tp_size": 2}, {"dp_replicate_size": 2, "dp_shard_size": 2},
], ids=str)  # fmt: skip
def test_copies_shares_and_parts_on_four_gpus(
    four_gpus: ranks.Ranks, tmp_path: pathlib.Path, parallel: dict[str, int]
) -> None:
    divided(four_gpus, tmp_path, parallel)
