"""Tests of the names that users of Accelerate import, and of functions that need no ``Accelerator``."""

from __future__ import annotations

import datetime
import io
import logging
import os
import pathlib
import pickle
import random
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.utils.data import DataLoader

import notebook_accel
from notebook_accel import (
    Accelerator,
    AcceleratorState,
    ConfigError,
    DistributedType,
    TrainingError,
    host_memory,
    utils,
)
from notebook_accel.logging import get_logger
from notebook_accel.state import GradientState, PartialState, is_initialized
from notebook_accel.utils.operations import copy_tensor_to_devices
from tests.training.ranks import Ranks, on_ranks


def test_plugins_that_can_not_be_honoured() -> None:
    for name in ("deepspeed_plugin", "torch_tp_plugin", "megatron_lm_plugin", "parallelism_config"):
        with pytest.raises(ConfigError, match=name):
            Accelerator(**{name: object()})
        Accelerator(**{name: None})
    Accelerator(dynamo_backend="no")
    with pytest.raises(TypeError, match="mixed_precison"):
        Accelerator(mixed_precison="bf16")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="rng_types has 'dice'"):
        Accelerator(rng_types=["dice"])
    with pytest.raises(ConfigError, match="gradient_accumulation_steps is 0"):
        Accelerator(cpu=True).gradient_accumulation_steps = 0


@pytest.mark.parametrize("name", [
    "DeepSpeedPlugin", "MegatronLMPlugin", "TorchTensorParallelPlugin", "AORecipeKwargs",
    "FP8RecipeKwargs", "MSAMPRecipeKwargs", "TERecipeKwargs",
])  # fmt: skip
def test_plugins_that_are_there_to_be_asked_about(name: str) -> None:
    plugin = getattr(utils, name)
    assert not isinstance(Accelerator(cpu=True).state.deepspeed_plugin, plugin)
    with pytest.raises(ConfigError, match=f"^{name} isn't supported") as raised:
        plugin(zero_stage=2)
    assert raised.value.why
    assert raised.value.fix


def test_settings_given_as_names() -> None:
    assert Accelerator(cpu=True, mixed_precision=utils.PrecisionType.BF16).mixed_precision == "bf16"
    Accelerator(cpu=True, rng_types=[utils.RNGType.TORCH], dynamo_backend=utils.DynamoBackend.NO)
    with pytest.raises(ConfigError, match="no arithmetic in 8 bits"):
        Accelerator(cpu=True, mixed_precision="fp8")


def test_placement_of_each_object() -> None:
    accelerator = Accelerator(cpu=True)
    for wrong in ([True], True, [True, False, None]):
        with pytest.raises(ConfigError, match="2 objects and device_placement"):
            accelerator.prepare(torch.nn.Linear(1, 1), "text", device_placement=wrong)
    model = torch.nn.Linear(1, 1, device="meta")  # such a model can't be moved
    assert accelerator.prepare("text", model, device_placement=[None, False])[1] is model
    assert Accelerator(cpu=True, device_placement=False).prepare(model) is model
    with pytest.raises(NotImplementedError):
        accelerator.prepare(torch.nn.Linear(1, 1, device="meta"))
    with pytest.raises(ConfigError, match="slice_fn_for_dispatch"):
        accelerator.prepare_data_loader(DataLoader([1]), slice_fn_for_dispatch=len)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="slice_fn_for_dispatch"):
        notebook_accel.prepare_data_loader(DataLoader([1]), slice_fn_for_dispatch=len)  # type: ignore[arg-type]


def test_saved_by_one_rank_and_loaded(tmp_path: pathlib.Path) -> None:
    utils.save({"a": torch.ones(2)}, tmp_path / "a.bin")
    assert utils.load(tmp_path / "a.bin", map_location="cpu")["a"].tolist() == [1, 1]
    Accelerator(cpu=True).save({"a": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=True)
    assert list(safetensors.torch.load_file(tmp_path / "a.safetensors")) == ["a"]
    utils.save(pathlib.Path("an object of some class"), tmp_path / "b.bin")
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        utils.load(tmp_path / "b.bin")
    assert utils.load(tmp_path / "b.bin", weights_only=False).name == "an object of some class"


def save_on_ranks(folder: str) -> None:
    rank = PartialState(cpu=True).process_index
    utils.save(rank, f"{folder}/main")
    utils.save(rank, f"{folder}/of the rank {rank}", save_on_each_node=True)


def test_only_rank_0_saves(two_ranks: Ranks, tmp_path: pathlib.Path) -> None:
    two_ranks.run(save_on_ranks, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["main", "of the rank 0"]
    assert utils.load(tmp_path / "main") == 0


@pytest.mark.parametrize(("call", "message"), [
    (lambda: utils.concatenate(["a", "b"]), "str isn't one"),
    (lambda: utils.concatenate([]), "NoneType isn't one"),
    (lambda: utils.recursively_apply(len, [torch.ones(1), "a"], error_on_other_type=True), "can't take a str"),
    (lambda: utils.find_batch_size(["a", torch.tensor(1)]), "no tensor with a length"),
    (lambda: utils.is_torch_version("about", "2.9"), "can't be compared by 'about'"),
    (lambda: utils.str_to_bool("perhaps"), "neither yes nor no"),
])  # fmt: skip
def test_what_helpers_refuse(call: Any, message: str) -> None:
    with pytest.raises((ConfigError, TrainingError), match=message) as raised:
        call()
    assert raised.value.fix


def test_variables_are_put_back_after_an_error() -> None:
    before = dict(os.environ)
    with pytest.raises(KeyError), utils.patch_environment(home="/", other=1), utils.clear_environment():
        os.environ["LEFT"] = "1"
        raise KeyError
    assert dict(os.environ) == before


@pytest.mark.parametrize(("inputs", "plain", "padded"), [
    ([1, 2, 3, 4, 5], ([1, 2], [3, 4], [5]), ([1, 2], [3, 4], [5, 5])),
    ((1, 2), ((1,), (2,), ()), ((1,), (2,), (2,))),
    ([], ([], [], []), ([], [], [])),
    ({"a": [1, 2], "b": ["x", "y"]}, ({"a": [1], "b": ["x"]}, {"a": [2], "b": ["y"]}, {"a": [], "b": []}),
     ({"a": [1], "b": ["x"]}, {"a": [2], "b": ["y"]}, {"a": [2], "b": ["y"]})),
])  # fmt: skip
@on_ranks(3)
def test_splitting(inputs: Any, plain: Any, padded: Any) -> None:
    state = PartialState(cpu=True)
    for apply_padding, by_rank in ((False, plain), (True, padded)):
        with state.split_between_processes(inputs, apply_padding=apply_padding) as part:
            assert part == by_rank[state.process_index]


@on_ranks(2)
def test_splitting_tensors_and_what_can_not_be_split() -> None:
    state = PartialState(cpu=True)
    with state.split_between_processes(torch.arange(3), apply_padding=True) as part:
        assert part.tolist() == [[0, 1], [2, 2]][state.process_index]
    for wrong, message in (("text", "can't cut str"), ({"a": [1], "b": [1, 2]}, "'a' has 1, 'b' has 2")):
        with pytest.raises(TrainingError, match=message), state.split_between_processes(wrong):
            pass


def seeds() -> Any:
    utils.set_seed(5, device_specific=True)
    own = (torch.rand(1).item(), random.random(), float(np.random.rand()))
    PartialState(cpu=True)
    utils.synchronize_rng_states(["numpy"])
    utils.synchronize_rng_state(utils.RNGType.TORCH)
    return own, (torch.rand(1).item(), float(np.random.rand())), random.random()


def test_seeds(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(seeds)
    assert all(one != other for one, other in zip(first[0], second[0], strict=True))
    assert first[1] == second[1]
    assert first[2] != second[2]
    utils.set_seed(5)
    assert (torch.rand(1).item(), random.random(), float(np.random.rand())) == first[0]
    with pytest.raises(ConfigError, match="'dice'"):
        utils.synchronize_rng_states(["dice"])


def test_algorithms_that_give_the_same_each_time() -> None:
    try:
        utils.set_seed(5, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@on_ranks(2)
def test_loggers() -> None:
    logger = get_logger("notebook_accel_test", log_level="INFO")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s %(funcName)s"))
    logger.logger.addHandler(handler)
    rank = PartialState(cpu=True).process_index
    logger.info("once %d", 1)
    logger.warning("each", main_process_only=False)
    logger.error("in order", main_process_only=False, in_order=True)
    for _ in range(2):
        logger.warning_once("warned")
    logger.debug("not shown")
    logger.logger.removeHandler(handler)
    on_each = "WARNING each test_loggers\nERROR in order test_loggers\n"
    on_main = f"INFO once 1 test_loggers\n{on_each}WARNING warned warning_once\n"
    assert stream.getvalue() == (on_each if rank else on_main)


@on_ranks(2)
def test_bars_on_the_main_process_only() -> None:
    rank = PartialState(cpu=True).process_index
    shown = io.StringIO()
    assert list(utils.tqdm(range(3), file=shown)) == [0, 1, 2]
    assert ("3/3" in shown.getvalue()) == (rank == 0)
    assert (shown.getvalue() == "") == (rank == 1)


def test_profile_settings_are_an_argument_or_a_handler(tmp_path: pathlib.Path) -> None:
    options = utils.ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path), record_shapes=True)
    for accelerator, given in ((Accelerator(), options), (Accelerator(kwargs_handlers=[options]), None)):
        with accelerator.profile(given) as profiler:
            torch.ones(3) @ torch.ones(3)
        assert any("dot" in event.key for event in profiler.key_averages())
        assert (tmp_path / "profile_0.json").stat().st_size > 0
        (tmp_path / "profile_0.json").unlink()
    with pytest.raises(ConfigError, match="'tpu'"):
        utils.ProfileKwargs(activities=["tpu"])


def test_how_states_look() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert repr(accelerator.state) == "AcceleratorState(rank 0 of 1, local rank 0, cpu, NO, mixed_precision='bf16')"
    assert repr(PartialState()) == "PartialState(rank 0 of 1, local rank 0, cpu, NO)"
    assert repr(accelerator.gradient_state) == (
        "GradientState(num_steps=1, sync_gradients=True, in_dataloader=False, end_of_dataloader=False, remainder=-1)"
    )


def test_settings_are_those_when_the_accelerator_was_made() -> None:
    loading, plugin = utils.DataLoaderConfiguration(), utils.GradientAccumulationPlugin(num_steps=2)
    group, scaler = utils.InitProcessGroupKwargs(), utils.GradScalerKwargs()
    accelerator = Accelerator(
        cpu=True, dataloader_config=loading, gradient_accumulation_plugin=plugin, kwargs_handlers=[group, scaler]
    )
    loading.even_batches, plugin.num_steps = False, 4
    assert accelerator.even_batches
    assert accelerator.gradient_accumulation_steps == 2
    accelerator.gradient_accumulation_steps = 3
    assert accelerator.gradient_state.num_steps == 3
    plugin.num_steps = 0
    with pytest.raises(ConfigError, match="num_steps"):
        Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    group.backend = "mpi"
    with pytest.raises(ConfigError, match="'mpi'"):
        Accelerator(cpu=True, kwargs_handlers=[group])


def test_the_state_of_the_process() -> None:
    AcceleratorState._reset_state()
    assert not is_initialized()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    assert is_initialized()
    assert AcceleratorState().mixed_precision == accelerator.state.mixed_precision == "bf16"
    assert AcceleratorState(mixed_precision="no").mixed_precision == "no"
    assert GradientState() is accelerator.gradient_state
    assert (PartialState().device, accelerator.distributed_type) == (accelerator.device, DistributedType.NO)
    AcceleratorState._reset_state()
    assert not is_initialized()
    assert AcceleratorState().mixed_precision == "no"
    GradientState._reset_state()
    assert GradientState() is not accelerator.gradient_state


@on_ranks(2)
def test_the_group_is_destroyed_and_made_again() -> None:
    state = PartialState(cpu=True, backend="gloo", timeout=datetime.timedelta(seconds=50))
    accelerator = Accelerator(cpu=True)
    assert state.backend == "gloo"
    assert accelerator.gather(torch.ones(1)).tolist() == [1, 1]
    with pytest.raises(ConfigError, match="comes too late: this rank has joined with gloo") as raised:
        PartialState(cpu=True, backend="nccl")
    assert raised.value.fix == "make it before the first Accelerator, or leave backend='nccl' out"
    state.destroy_process_group()
    assert not torch.distributed.is_initialized()
    assert Accelerator(cpu=True).gather(torch.ones(1)).tolist() == [1, 1]


@on_ranks(2)
def test_collectives_without_an_accelerator() -> None:
    state = PartialState(cpu=True)
    own = torch.tensor([float(state.process_index)])
    assert utils.gather(own).tolist() == [0, 1]
    assert utils.reduce(own, "sum", scale=2.0).item() == 2
    assert state.distributed_type == "MULTI_CPU"


@on_ranks(2)
def test_a_tensor_of_one_rank_is_copied_to_all() -> None:
    rank = PartialState(cpu=True).process_index
    copied = copy_tensor_to_devices(torch.tensor([[True, False]]) if rank == 1 else None)
    assert copied.tolist() == [[True, False]]
    with pytest.raises(TrainingError, match="on no rank"):
        copy_tensor_to_devices()


def test_memory_by_device() -> None:
    free = utils.get_max_memory()
    assert 0 < free["cpu"] <= host_memory.total_bytes()
    assert len(free) == 1 + torch.cuda.device_count()
    assert list(utils.get_max_memory({"disk": "1GB", "cpu": 5, 1: 2, 0: 1})) == [0, 1, "cpu", "disk"]
    with pytest.raises(ConfigError, match="'gpu'"):
        utils.get_max_memory({"gpu": 1})
    with pytest.raises(ConfigError, match="size is '1 PB'"):
        utils.convert_file_size_to_int("1 PB")
