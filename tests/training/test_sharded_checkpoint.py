"""Checkpoints of sharded models, loaded on any number of ranks, sharded or whole."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # as everybody writes it

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin, GradientAccumulationPlugin
from notebook_accel.errors import CheckpointError
from notebook_accel.training.sharded_files import ShardedFiles
from tests.training import sharded_programs
from tests.training.ranks import Ranks, on_ranks
from tests.training.sharded_programs import Case

slow = pytest.mark.slow


@pytest.mark.parametrize(("first", "second"), [
    pytest.param(Case(sharded=False), Case(), id="whole to sharded", marks=slow),
    pytest.param(Case(), Case(sharded=False), id="sharded to whole"),
    pytest.param(Case(plugin={"state_dict_type": "full_state_dict"}), Case(), id="in whole files", marks=slow),
    pytest.param(Case(plugin={"ignored_modules": "blocks.1"}), Case(), id="ignored modules", marks=slow),
    pytest.param(Case(dynamo={"backend": "aot_eager"}), Case(), id="compiled", marks=slow),
    pytest.param(
        Case(precision="bf16"), Case(plugin={"activation_checkpointing": True, "mixed_precision_policy": "bf16"}),
        id="other settings", marks=slow,
    ),
])  # fmt: skip
def test_from_one_kind_to_another(groups: dict[int, Ranks], tmp_path: pathlib.Path, first: Case, second: Case) -> None:
    (expected, losses), *_ = groups[2].run(sharded_programs.saved, str(tmp_path / "state"), first)
    files = "model.safetensors" if not first.sharded or "state_dict_type" in first.plugin else "sharded"
    assert {"model.safetensors", "sharded"} & {*os.listdir(tmp_path / "state")} == {files}
    (state, resumed), *_ = groups[4].run(sharded_programs.loaded, str(tmp_path / "state"), second)
    assert state == expected
    tolerance = 1e-6 if first.precision == "no" else 0.05
    assert resumed == pytest.approx(losses, rel=0, abs=tolerance)


def test_each_rank_writes_its_share(groups: dict[int, Ranks], tmp_path: pathlib.Path) -> None:
    groups[2].run(sharded_programs.saved, str(tmp_path / "sharded"), Case())
    files = sharded_programs.files_in(str(tmp_path / "sharded"))
    assert files == [
        "checkpoint.json", "custom_checkpoint.bin", "optimizer.bin", "rank_0.bin", "rank_1.bin", "sharded/.metadata",
        "sharded/__0_0.distcp", "sharded/__1_0.distcp", "sharded_model.bin",
    ]  # fmt: skip
    sizes = [os.path.getsize(tmp_path / "sharded" / "sharded" / f"__{rank}_0.distcp") for rank in (0, 1)]
    assert max(sizes) < 1.2 * min(sizes)


class Registered:
    """An average of a sharded model's weights, as users register it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.values = [parameter.detach() * 2 for parameter in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values, "kind": "average"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


def saved_within_a_window(folder: str, sync_each_batch: bool, load: bool) -> Any:
    """Return the losses from the middle of a window on, and the sum of an average that was registered."""
    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=sync_each_batch)
    sharding = FullyShardedDataParallelPlugin()
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, fsdp_plugin=sharding)
    torch.manual_seed(7 + load)
    model = sharded_programs.Writer()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    net, optimizer = accelerator.prepare(model, optimizer)
    average = Registered(net)
    accelerator.register_for_checkpointing(average)
    if load:
        accelerator.load_state(folder)
    x = sharded_programs.digits()[: 4 * 2 * 8].view(8, 2, 4, -1)[:, accelerator.process_index]
    losses = []
    for number in range(5 if load else 0, 8):
        with accelerator.accumulate(net):
            loss = F.cross_entropy(net(x[number, :, :-1]).flatten(0, 1), x[number, :, 1:].flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if number == 4 and not load:
            accelerator.save_state(folder)
            accelerator.save_state(f"{folder} in the background", async_=True)
    total = float(sum(value.sum().full_tensor() for value in average.values))  # type: ignore[attr-defined]
    accelerator.end_training()
    return losses[-3:], total


@slow
def test_within_an_accumulation_window(two_ranks: Ranks, tmp_path: pathlib.Path) -> None:
    saved_losses = two_ranks.run(saved_within_a_window, str(tmp_path / "state"), True, False)
    for name in ("state", "state in the background"):
        assert two_ranks.run(saved_within_a_window, str(tmp_path / name), True, True) == saved_losses
    with pytest.raises(CheckpointError, match="within an accumulation window of a sharded model") as raised:
        two_ranks.run(saved_within_a_window, str(tmp_path / "other"), False, False)
    assert "sync_each_batch=True" in (raised.value.fix or "")


@on_ranks(2)
def test_within_a_window_of_the_programs_own(tmp_path: pathlib.Path) -> None:
    """Save three checkpoints: before, after a backward pass in ``no_sync``, and after one that averages."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    model = sharded_programs.Writer()
    net, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = sharded_programs.digits()[:2]

    def is_saved() -> bool:
        try:
            accelerator.save_state(tmp_path / "state")
        except CheckpointError as error:
            assert "within an accumulation window of a sharded model" in str(error)  # noqa: PT017
            return False
        return True

    saved = [is_saved()]
    for context in (accelerator.no_sync(net), contextlib.nullcontext()):
        with context:
            accelerator.backward(F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()))
        saved.append(is_saved())
    optimizer.step()
    assert saved == [True, False, True]


@on_ranks(2)
def test_a_hook_that_removes_the_weights_on_one_rank_is_an_error_on_all(tmp_path: pathlib.Path) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
    accelerator.prepare(sharded_programs.Writer())
    if accelerator.is_main_process:
        accelerator.register_save_state_pre_hook(lambda _models, weights, _folder: weights.clear())
    said = r"A hook has removed the weights of a sharded model on some ranks only\."
    with pytest.raises(CheckpointError, match=said):
        accelerator.save_state(tmp_path / "state")
    accelerator.wait_for_everyone()
    assert os.listdir(tmp_path) == []
    accelerator.end_training()


class Malicious:
    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self._path,)


@pytest.mark.parametrize(("width", "text"), [
    (8, "blocks.0.down.bias: (24,) in the checkpoint, (8,) in the model"),
    (24, "isn't whole: sharded/__1_0.distcp has"),
])  # fmt: skip
@on_ranks(2)
def test_spoilt_checkpoints(tmp_path: pathlib.Path, width: int, text: str) -> None:
    """A checkpoint of another model, and one whose files aren't whole, change nothing."""
    folder = tmp_path / "state"
    saving, accelerator = (Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin()) for _ in range(2))
    saving.prepare(sharded_programs.Writer())
    saving.save_state(folder)
    net = accelerator.prepare(sharded_programs.Writer(width))
    if width == 24 and accelerator.is_main_process:
        share = folder / "sharded" / "__1_0.distcp"
        share.write_bytes(share.read_bytes()[:-1])
    before = accelerator.get_state_dict(net)
    with pytest.raises(CheckpointError, match=re.escape(text)):
        accelerator.load_state(folder)
    after = accelerator.get_state_dict(net)
    assert all(torch.equal(before[name], value) for name, value in after.items())


def test_the_index_can_not_run_code(tmp_path: pathlib.Path) -> None:
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / ".metadata").write_bytes(pickle.dumps(Malicious(tmp_path / "code-that-ran")))
    with pytest.raises(CheckpointError, match=r"it refers to pathlib\.Path\.touch|it refers to") as raised:
        ShardedFiles(tmp_path)
    assert "could run code" in str(raised.value)
    assert not (tmp_path / "code-that-ran").exists()
