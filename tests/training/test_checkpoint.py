"""Tests of saving and loading by all ranks together, and of the errors."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from notebook_accel import (
    Accelerator,
    ConfigError,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
    TrainingError,
    notebook_launcher,
)
from notebook_accel.errors import CheckpointError, CollectiveError, RankFailedError
from notebook_accel.reporting import reporter
from notebook_accel.training import checkpoint_saving
from notebook_accel.training.checkpoint_folders import MANIFEST
from notebook_accel.training.handlers import GradScalerKwargs
from notebook_accel.training.precision import LossScaler
from tests import processes
from tests.training import ranks, sharded_programs
from tests.training.ranks import Ranks, caught_warnings, on_ranks
from tests.training.sharded_programs import Case

slow = functools.partial(pytest.param, marks=pytest.mark.slow)


class Register:
    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def prepared(width: int = 3, **options: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True, **options)
    model = torch.nn.Linear(width, 2)
    net, optimizer, _ = accelerator.prepare(
        model, torch.optim.Adam(model.parameters()), DataLoader(torch.arange(4), batch_size=2)
    )
    return accelerator, net, optimizer


def numbered(folder: pathlib.Path, **options: Any) -> ProjectConfiguration:
    return ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, **options)


def test_numbered_checkpoints(tmp_path: pathlib.Path) -> None:
    accelerator, _, _ = prepared(project_config=numbered(tmp_path, total_limit=3, iteration=8))
    for _ in range(4):
        folder = accelerator.save_state()
    assert folder == str(tmp_path / "checkpoints" / "checkpoint_11")
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_10", "checkpoint_11", "checkpoint_9"]
    again, _, _ = prepared(project_config=numbered(tmp_path))
    assert again.load_state(map_location="cpu") == folder  # as in Accelerate's documentation
    assert again.save_iteration == 12
    other, _, _ = prepared(project_config=numbered(tmp_path, iteration=11))
    with pytest.raises(ConfigError, match="checkpoint_11 already"):
        other.save_state()


def test_a_number_that_is_taken_is_warned_of_when_training_begins(tmp_path: pathlib.Path) -> None:
    first, _, _ = prepared(project_config=numbered(tmp_path))
    first.save_state()
    again, net, _ = prepared(project_config=numbered(tmp_path))
    with pytest.warns(UserWarning, match=r"save_state will fail.*checkpoint_0 already"):
        again.backward(net(torch.ones(1, 3)).sum())
    _, net, optimizer = prepared(project_config=numbered(tmp_path))
    net(torch.ones(1, 3)).sum().backward()
    with pytest.warns(UserWarning, match="save_state will fail") as caught:
        optimizer.step()
    assert caught[0].filename == __file__
    resumed, net, _ = prepared(project_config=numbered(tmp_path))
    resumed.load_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.backward(net(torch.ones(1, 3)).sum())


def test_a_folder_beside_the_numbers_is_warned_of(tmp_path: pathlib.Path) -> None:
    accelerator, _, _ = prepared(project_config=numbered(tmp_path))
    with pytest.warns(UserWarning, match="doesn't save to best"):
        assert accelerator.save_state("best") == str(tmp_path / "checkpoints" / "checkpoint_0")


def test_objects_that_are_prepared_too_late_are_warned_of(tmp_path: pathlib.Path) -> None:
    def objects() -> tuple[Accelerator, Any, list[Any]]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loaders = [DataLoader(torch.arange(2), batch_size=1) for _ in range(2)]
        return Accelerator(cpu=True), model, [optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1), *loaders]

    accelerator, model, others = objects()
    _, _, _, loader, _ = accelerator.prepare(model, *others)
    for _ in loader:
        accelerator.save_state(tmp_path / "state")
        break
    accelerator, model, others = objects()
    accelerator.prepare(model)
    accelerator.load_state(tmp_path / "state")
    with caught_warnings() as caught:
        accelerator.prepare(*others)
    late = [str(warning.message).split()[1] for warning in caught if "after load_state" in str(warning.message)]
    assert late == ["optimizer", "loader", "scheduler"]
    accelerator, model, others = objects()
    accelerator.prepare(model, *others)
    accelerator.load_state(tmp_path / "state")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.prepare(DataLoader(torch.arange(2), batch_size=1))


@pytest.mark.parametrize(("others", "text"), [
    ("swapped", ": 1.weight of shape (2, 2) is where this run has 0.weight of shape (2, 2)"),
    ("another", ": 1.weight of shape (2, 2) is where this run has 2.weight of shape (3, 2)"),
])  # fmt: skip
def test_the_state_of_other_parameters_is_refused(tmp_path: pathlib.Path, others: str, text: str) -> None:
    def of(places: list[int]) -> Accelerator:
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Sequential(*(torch.nn.Linear(2, width, bias=False) for width in (2, 2, 3)))
        accelerator.prepare(model, torch.optim.Adam([model[place].weight for place in places]))
        return accelerator

    of([1, 0]).save_state(tmp_path / "state")
    of([1, 0]).load_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match=re.escape(text)):
        of([0, 1] if others == "swapped" else [2, 0]).load_state(tmp_path / "state")


class Refusing(Register):
    def load_state_dict(self, _: dict[str, Any]) -> None:
        raise KeyError("epoch")


@pytest.mark.parametrize(("fault", "text"), [
    ("kind", "The saved state is of another optimizer than SGD: it has no momentum, dampening"),
    ("group", "Rank 0 could not load a checkpoint: ValueError: loaded state dict contains a parameter group"),
    ("object", "Rank 1 could not load a checkpoint: KeyError: 'epoch'"),
    ("shape", "weight: (2, 3) in the checkpoint, (2, 5) in the model"),
])  # fmt: skip
@on_ranks(2)
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path: pathlib.Path, fault: str, text: str) -> None:
    def trained(fault: str, lr: float) -> tuple[Accelerator, dict[str, Any]]:
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(int(lr))
        model = torch.nn.Linear(5 if fault == "shape" else 3, 2)
        others = torch.nn.Linear(1, 1)
        groups: Any = [*model.parameters(), *others.parameters()] if fault == "group" else model.parameters()
        optimizer = torch.optim.SGD(groups, lr=lr) if fault == "kind" else torch.optim.Adam(groups, lr=lr)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        first = torch.optim.SGD(others.parameters(), lr=lr, momentum=0.9)
        net, other_net, first, optimizer, schedule = accelerator.prepare(model, others, first, optimizer, schedule)
        accelerator.backward(net(torch.ones(1, model.in_features)).sum() + other_net(torch.ones(1, 1)).sum())
        first.step()
        optimizer.step()
        schedule.step()
        counter, averaged = Register(lr), torch.nn.Linear(2, 2)
        is_refusing = fault == "object" and accelerator.process_index == accelerator.num_processes - 1
        accelerator.register_for_checkpointing(counter, averaged, Refusing() if is_refusing else Register())
        parts = {"other model": others, "model": model, "first optimizer": first, "optimizer": optimizer}
        return accelerator, {**parts, "scheduler": schedule, "counter": counter, "averaged": averaged}

    def states(parts: dict[str, Any]) -> dict[str, str]:
        return {name: repr(part.state_dict()) for name, part in parts.items()}

    trained("", 1.0)[0].save_state(tmp_path / "state")
    accelerator, parts = trained(fault, 2.0)
    before = states(parts)
    with pytest.raises(CheckpointError, match=re.escape(text)):
        accelerator.load_state(tmp_path / "state", strict=fault != "shape")
    assert states(parts) == before


class _Around(torch.optim.Optimizer):
    """An optimizer around another, which has no state of its own."""

    def __init__(self, base: torch.optim.Optimizer, defaults: dict[str, Any] | None) -> None:
        self.base = base
        self.param_groups = base.param_groups
        self.state = base.state
        if defaults is not None:
            self.defaults = {**base.defaults, **defaults}

    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups = self.base.param_groups


@pytest.mark.parametrize("defaults", [None, {"rho": 0.05}])
def test_the_state_of_an_optimizer_around_another_is_loaded(
    tmp_path: pathlib.Path, defaults: dict[str, Any] | None
) -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator.prepare(model, _Around(optimizer, defaults))
    accelerator.save_state(tmp_path / "state")
    optimizer.param_groups[0]["lr"] = 0.2
    accelerator.load_state(tmp_path / "state")
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_files_have_the_names_that_accelerates_have(tmp_path: pathlib.Path) -> None:
    accelerator, _, _ = prepared()
    accelerator.register_for_checkpointing(Register())
    accelerator.save_state(tmp_path / "state")
    assert sorted(os.listdir(tmp_path / "state")) == [
        "checkpoint.json", "custom_checkpoint.bin", "model.safetensors", "optimizer.bin", "rank_0.bin",
    ]  # fmt: skip
    accelerator.save_state(tmp_path / "state", safe_serialization=False)
    assert (tmp_path / "state" / "pytorch_model.bin").exists()
    assert not (tmp_path / "state" / "model.safetensors").exists()
    assert accelerator.load_state(tmp_path / "state") == str(tmp_path / "state")


def test_what_others_keep_in_the_folder_stays_there(tmp_path: pathlib.Path) -> None:
    accelerator, _, _ = prepared()
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "log").write_text("mine")
    for _ in range(2):
        accelerator.save_state(tmp_path)
    assert (tmp_path / "events" / "log").read_text() == "mine"
    assert accelerator.load_state(tmp_path) == str(tmp_path)


def change_manifest(folder: pathlib.Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Make a checkpoint one that other ranks, or an earlier version, might have saved."""
    path = folder / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_an_earlier_version_has_saved_no_tensors(tmp_path: pathlib.Path) -> None:
    accelerator, _, _ = prepared()
    prompt = accelerator.prepare(torch.zeros(2, requires_grad=True))
    accelerator.save_state(tmp_path / "state")
    change_manifest(tmp_path / "state", lambda manifest: [manifest.pop("optimizers"), manifest["counts"].pop("tensor")])
    torch.nn.init.ones_(prompt)
    with pytest.warns(UserWarning, match="has no prepared tensors: those of this run stay as they are"):
        accelerator.load_state(tmp_path / "state")
    assert prompt.tolist() == [1, 1]


def test_the_own_state_of_each_saved_rank_is_read_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, _, _ = prepared()
    folder = pathlib.Path(accelerator.save_state(tmp_path / "state"))
    shutil.copy(folder / "rank_0.bin", folder / "rank_1.bin")
    change_manifest(folder, lambda manifest: manifest.update(world_size=2))
    read, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda path, **options: (read.append(path.name), load(path, **options))[1])
    accelerator.load_state(folder)
    assert sorted(read) == ["optimizer.bin", "rank_0.bin"]


class Adapted(torch.nn.Module):
    """A model whose state dict has its adapter alone, if ``is_small``."""

    def __init__(self, *, is_small: bool) -> None:
        super().__init__()
        self.base, self.adapter = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        if is_small:
            self._register_state_dict_hook(
                lambda *of: [of[1].pop(f"base.{name}") for name in ("weight", "bias")] and None
            )


@pytest.mark.parametrize(("saved", "loads"), [
    (lambda: Adapted(is_small=False), lambda: Adapted(is_small=True)),
    (lambda: torch.nn.Linear(2, 3), lambda: torch.nn.LazyLinear(3)),
])  # fmt: skip
def test_what_a_module_itself_adapts_is_loaded_if_it_need_not_be_alike(
    tmp_path: pathlib.Path, saved: Callable[[], torch.nn.Module], loads: Callable[[], torch.nn.Module]
) -> None:
    models = []
    for make in (saved, loads):
        accelerator = Accelerator(cpu=True)
        models.append(accelerator.prepare(make()))
        if make is saved:
            accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state", strict=False)
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


def test_registered_objects(tmp_path: pathlib.Path) -> None:
    accelerator, _, _ = prepared()
    with pytest.raises(TrainingError, match="int can't be part of a checkpoint"):
        accelerator.register_for_checkpointing(3)
    kept = Register({"best": torch.ones(2)})
    accelerator.register_for_checkpointing(kept)
    accelerator.save_state(tmp_path / "state")
    kept.value = None
    accelerator.load_state(tmp_path / "state")
    assert kept.value["best"].tolist() == [1, 1]
    kept.value = pathlib.Path("an object of some class")
    accelerator.save_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match="weights_only"):
        accelerator.load_state(tmp_path / "state")
    kept.value = None
    accelerator.load_state(tmp_path / "state", load_kwargs={"weights_only": False})
    assert kept.value == pathlib.Path("an object of some class")


def test_hooks(tmp_path: pathlib.Path) -> None:
    accelerator, net, _ = prepared()
    seen: list[Any] = []

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        torch.save(weights.pop(), f"{folder}/mine")
        seen.append(models)

    def load(models: list[Any], folder: str) -> None:
        models.pop().load_state_dict(torch.load(f"{folder}/mine"))

    saving, loading = accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)
    accelerator.save_state(tmp_path / "state")
    assert sorted(os.listdir(tmp_path / "state")) == ["checkpoint.json", "mine", "optimizer.bin", "rank_0.bin"]
    before = net.weight.detach().clone()
    net.weight.data.zero_()
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(net.weight, before)
    assert seen == [[net]]
    saving.remove()
    loading.remove()
    accelerator.save_state(tmp_path / "state")
    assert (tmp_path / "state" / "model.safetensors").exists()


def test_gradients_of_a_window_whose_model_a_hook_loads(tmp_path: pathlib.Path) -> None:
    accelerator, net, optimizer = prepared(gradient_accumulation_steps=2)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
    accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
    with accelerator.accumulate(net):
        accelerator.backward(net(torch.ones(1, 3)).sum())
    accelerator.save_state(tmp_path / "state")
    before = net.weight.grad.clone()
    optimizer.optimizer.zero_grad()
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(net.weight.grad, before)


def test_a_model_alone_to_evaluate_it(tmp_path: pathlib.Path) -> None:
    accelerator, net, _ = prepared()
    accelerator.save_state(tmp_path / "state")
    evaluating = Accelerator(cpu=True)
    model = evaluating.prepare(torch.nn.Linear(3, 2))
    evaluating.load_state(tmp_path / "state")
    assert torch.equal(model.weight, net.weight)


def test_the_loss_scale_is_part_of_it(tmp_path: pathlib.Path) -> None:
    accelerator, _, _ = prepared()
    for scale in (8.0, 4.0):  # an Accelerator has one with fp16 only, and so on a GPU
        accelerator._precision.scaler = LossScaler(torch.device("cpu"), GradScalerKwargs(init_scale=scale))
        if scale == 8.0:
            accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    assert accelerator._precision.scaler is not None
    assert accelerator._precision.scaler.factor == 8.0


class Interrupted:
    """An object whose pickling is interrupted; in another thread than the main one, pickling would go on."""

    def __init__(self) -> None:
        self.may_go_on, self.went_on = threading.Event(), False

    def state_dict(self) -> dict[str, Any]:
        return {"value": self}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        """Load nothing."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        signal.raise_signal(signal.SIGINT)
        self.may_go_on.wait(20)
        self.went_on = True
        return dict, ()


def test_nothing_is_written_after_an_interrupt(tmp_path: pathlib.Path) -> None:
    accelerator, _, _ = prepared()
    interrupted = Interrupted()
    accelerator.register_for_checkpointing(interrupted)
    with pytest.raises(KeyboardInterrupt):
        accelerator.save_state(tmp_path / "state")
    interrupted.may_go_on.set()
    for thread in threading.enumerate():
        if "checkpoint" in thread.name:
            thread.join(20)
    assert not interrupted.went_on
    assert os.listdir(tmp_path) == []


def test_no_folder() -> None:
    accelerator, _, _ = prepared()
    with pytest.raises(ConfigError, match="no folder"):
        accelerator.save_state()
    with pytest.raises(ConfigError, match="no folder"):
        accelerator.load_state()


def spoil(folder: pathlib.Path, how: str) -> None:
    file = folder / {"optimizer": "optimizer.bin", "rank": "rank_0.bin"}.get(how, "model.safetensors")
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "no manifest":
        (folder / MANIFEST).unlink()
    elif how == "half a manifest":
        (folder / MANIFEST).write_text("{")
    elif how == "other bytes":
        file.write_bytes(b"\xff" * file.stat().st_size)
    elif how == "another place":
        folder.rename(folder.with_name("other"))
    elif how != "another model":
        file.unlink()


@pytest.mark.parametrize(("how", "text"), [
    ("truncated", "model.safetensors has"),
    ("optimizer", "optimizer.bin is missing"),
    ("rank", "rank_0.bin is missing"),
    ("no manifest", "isn't a checkpoint"),
    ("half a manifest", "isn't a checkpoint"),
    ("other bytes", "can't be read"),
    ("another place", "use another one of "),
    ("another model", "weight: (2, 3) in the checkpoint, (2, 5) in the model"),
])  # fmt: skip
@on_ranks(2)
def test_spoilt_checkpoint_is_an_error_on_every_rank(tmp_path: pathlib.Path, how: str, text: str) -> None:
    prepared()[0].save_state(tmp_path / "state")
    accelerator, net, _ = prepared(5 if how == "another model" else 3)
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            spoil(tmp_path / "state", how)
    before = accelerator.get_state_dict(net)["weight"].clone()
    with pytest.raises(CheckpointError) as raised:
        accelerator.load_state(tmp_path / "state")
    assert text in str(raised.value)
    if how == "another place":
        assert f"{tmp_path}: other" in str(raised.value)
    assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == [0, 1]
    assert torch.equal(accelerator.get_state_dict(net)["weight"], before)


@on_ranks(2)
def test_a_rank_that_can_not_write(tmp_path: pathlib.Path) -> None:
    folder = str(tmp_path / "state")
    accelerator, _, _ = prepared()
    accelerator.save_state(folder)

    def fail(*_: Any) -> None:
        if accelerator.process_index == 1:
            raise OSError("no space left")

    accelerator.register_save_state_pre_hook(fail)
    said = "Rank 1 could not write its part of a checkpoint: OSError: no space left"
    with pytest.raises(CheckpointError, match=said):
        accelerator.save_state(folder)
    assert accelerator.load_state(folder) == folder
    assert os.listdir(tmp_path) == ["state"]


@on_ranks(2)
def test_one_rank_loads_what_another_saves(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "state"
    accelerator, _, _ = prepared()
    accelerator.save_state(folder)
    with pytest.raises(CollectiveError) as raised:
        accelerator.save_state(folder) if accelerator.process_index else accelerator.load_state(folder)
    accelerator.wait_for_everyone()
    assert "rank 0: find a checkpoint at " in str(raised.value)
    assert "rank 1: begin a checkpoint at " in str(raised.value)


def test_loading_before_anything_was_prepared(tmp_path: pathlib.Path) -> None:
    prepared()[0].save_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match="nothing has been prepared"):
        Accelerator(cpu=True).load_state(tmp_path / "state")


def warnings_of(function: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return a function's value and the warnings about ``save_state`` that it causes."""
    checkpoint_saving._warn_of_absence.cache_clear()
    with caught_warnings() as caught:
        value = function()
    return value, [f"{warning.filename}: {warning.message}" for warning in caught if "save_state" in str(warning)]


def save_on_some(folder: str, savers: tuple[int, ...], **options: Any) -> tuple[list[str], list[str], int]:
    """Save on some ranks twice in a row, train a step, and save on all ranks. Return folders, warnings and a number."""
    accelerator, net, optimizer = prepared(project_config=numbered(pathlib.Path(folder), **options))
    averaged: list[int] = []
    accelerator.before_save.append(lambda: averaged.append(int(accelerator.reduce(torch.ones(())))))

    def train() -> list[str]:
        saves = accelerator.process_index in savers
        folders = [accelerator.save_state(async_=number == 0) for number in range(2) if saves]
        accelerator.backward(net(torch.ones(1, 3)).sum())
        optimizer.step()
        assert averaged == []
        return [*folders, accelerator.save_state()]

    folders, said = warnings_of(train)
    assert averaged == [accelerator.num_processes]
    return folders, said, accelerator.save_iteration


def test_rank_0_saves_alone_while_the_others_go_on(two_ranks: Ranks, tmp_path: pathlib.Path) -> None:
    (folders, said, following), other = two_ranks.run(save_on_some, str(tmp_path), (0,))
    names = ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    assert [os.path.basename(folder) for folder in folders] == names
    assert other == ([folders[-1]], [], 3)
    assert following == 3
    (text,) = said
    assert text.startswith(f"{__file__}: save_state wasn't called on rank 1: rank 0 saves alone")
    ranks = [json.loads((tmp_path / "checkpoints" / name / MANIFEST).read_text())["world_size"] for name in names]
    assert ranks == [1, 1, 2]


@pytest.mark.slow
def test_ranks_besides_rank_0_save_nothing_when_it_saves_alone(three_ranks: Ranks, tmp_path: pathlib.Path) -> None:
    by_rank = three_ranks.run(save_on_some, str(tmp_path), (0, 2))
    assert [len(said) for _, said, _ in by_rank] == [1, 0, 0]
    last = by_rank[0][0][-1]
    assert [folders for folders, _, _ in by_rank[1:]] == [[last], ["", "", last]]
    assert [following for _, _, following in by_rank] == [3, 3, 3]


@pytest.mark.parametrize(("call", "caller", "sharded", "text"), [
    ("save_state", 0, True, "save_state wasn't called on rank 1.\nEach rank writes its share"),
    slow("save_state", 1, False, "save_state wasn't called on rank 0.\nRank 0 writes"),
    slow("load_state", 0, False, "load_state wasn't called on rank 1.\nOtherwise the ranks would train different"),
])  # fmt: skip
@on_ranks(2)
def test_a_rank_alone_cannot(tmp_path: pathlib.Path, call: str, caller: int, sharded: bool, text: str) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin() if sharded else None)
    model = torch.nn.Linear(3, 2)
    net, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.save_state(tmp_path / "state")
    if accelerator.process_index == caller:
        with pytest.raises(CheckpointError, match=text) as raised:
            getattr(accelerator, call)(tmp_path / "state")
        assert "not under `if accelerator.is_main_process:`" in str(raised.value)
    accelerator.backward(net(torch.ones(1, 3)).sum())
    accelerator.wait_for_everyone()


def save_late(folder: str) -> list[str]:
    """Rank 1 has sent rank 0 a message that it hasn't received, and comes once rank 0 has learnt what it does."""
    accelerator, net, _ = prepared()
    group = accelerator._backend._group
    subgroup = dist.new_group([1])
    accelerator.backward(net(torch.ones(1, 3)).sum())
    if accelerator.process_index == 1:
        sent = dist.isend(torch.ones(1), 0)
        dist.all_reduce(torch.ones(1), group=subgroup)
        answered = group._watchdog._answered
        processes.wait_until(lambda: group._watchdog._answered > answered + 1, "rank 0 has asked twice", 60)
    _, said = warnings_of(lambda: accelerator.save_state(folder))
    if accelerator.process_index == 0:
        dist.recv(torch.ones(1), 1)
    else:
        sent.wait()
    accelerator.wait_for_everyone()
    return said


@pytest.mark.slow
def test_a_rank_that_is_late_is_waited_for(two_ranks: Ranks, tmp_path: pathlib.Path) -> None:
    assert two_ranks.run(save_late, str(tmp_path / "state")) == [[], []]
    assert json.loads((tmp_path / "state" / MANIFEST).read_text())["world_size"] == 2


def test_a_program_whose_rank_0_saves_alone_resumes(groups: dict[int, Ranks], tmp_path: pathlib.Path) -> None:
    """Training scripts of diffusers save so. The checkpoint has the position of all ranks in their samples."""
    folder, case = str(tmp_path / "state"), Case(sharded=False, alone=True)
    (expected, losses), *_ = groups[2].run(sharded_programs.saved, folder, case)
    for number in (2, 1):
        (state, resumed), *_ = groups[number].run(sharded_programs.loaded, folder, case)
        assert state == expected
        assert resumed == pytest.approx(losses, rel=0, abs=1e-6)


def fail_before_save(folder: str, told: str) -> None:
    accelerator, _, _ = prepared()
    if accelerator.process_index == 1:
        reporter().at_close.append(lambda: pathlib.Path(told).write_text(str(reporter().has_failed)))
        raise OSError("no more data")
    accelerator.save_state(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("engine")
def test_rank_0_does_not_save_alone_because_another_has_failed(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RankFailedError, match="no more data"):
        notebook_launcher(fail_before_save, (str(tmp_path / "state"), str(tmp_path / "told")), num_processes=2)
    assert os.listdir(tmp_path) == ["told"]
    assert (tmp_path / "told").read_text() == "True"


def is_passed_by_one_that_ends(has_failed: bool) -> bool | None:
    watchdog = Accelerator(cpu=True)._backend._group._watchdog
    if os.environ["RANK"] == "1":
        reporter().has_failed = has_failed
        watchdog.close()
        return None
    processes.wait_until(lambda: watchdog._store.check(["1 ended"]), "rank 1 has ended", 60)
    passed: bool = watchdog._has_passed(1, watchdog._progress())
    return passed


@pytest.mark.parametrize("has_failed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_rank_that_ends_has_passed_unless_it_has_failed(has_failed: bool) -> None:
    with ranks.running(2) as both:
        assert both.run(is_passed_by_one_that_ends, has_failed) == [not has_failed, None]
