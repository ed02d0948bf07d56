"""Programs that use the functions around training, with the library's name left open, like ``programs``."""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple

import torch

from tests.training.programs import accelerator_of


class Pair(NamedTuple):
    left: Any
    right: Any


def collectives(api: str) -> Any:
    utils = importlib.import_module(f"{api}.utils")
    accelerator = accelerator_of(api)
    rank = accelerator.process_index
    own = torch.tensor([[float(rank), 2.0]])
    objects = [rank, {"rank": rank}]
    found: list[Any] = [
        utils.listify(accelerator.gather({"pair": Pair(own, [own * 2]), "scalar": torch.tensor(rank)})),
        utils.listify(accelerator.reduce((own, [own + 1]), "sum")),
        utils.listify(accelerator.reduce(own.clone(), "mean")),
        utils.listify(utils.reduce(own.clone())),
        utils.listify(accelerator.reduce(own.clone(), "max")),
        utils.listify(utils.reduce(own.clone(), "none")),
        utils.listify(utils.broadcast({"own": own.clone()}, from_process=0)),
        utils.gather_object([f"rank {rank}"]),
        utils.broadcast_object_list(objects, from_process=0),
    ]
    for options in ({}, {"pad_index": 7}, {"dim": 1, "pad_first": True}):
        longer = torch.ones((2, 1 + rank) if options.get("dim") else (1 + rank, 2))
        found.append(accelerator.pad_across_processes(longer, **options).tolist())
    for inputs in (["a", "b", "c"], torch.arange(5), {"ids": [1, 2, 3], "texts": ["a", "b", "c"]}):
        with accelerator.split_between_processes(inputs) as part:
            found.append(utils.listify(part))
    with accelerator.split_between_processes(["a", "b", "c"], apply_padding=True) as part:
        found.append(part)
    if rank == accelerator.num_processes - 1:
        accelerator.set_trigger()
    found += [bool(accelerator.check_trigger()), bool(accelerator.check_trigger())]
    return found


def trees(api: str) -> Any:
    """Use the functions of nested tensors that need one rank only."""
    utils = importlib.import_module(f"{api}.utils")
    tree = {"pair": Pair(torch.tensor([[1.0, 2.0]]), [torch.tensor([3.0])]), "text": "a"}
    tensors = {"a": (torch.arange(3), [torch.arange(4.0)])}
    joined = utils.concatenate([tensors, tensors])
    half = utils.convert_to_fp32({"a": torch.ones(1).half(), "b": torch.ones(1).double()})
    return [
        utils.listify(tree),
        type(utils.listify(tree)["pair"]).__name__,
        utils.listify(joined),
        type(joined["a"]).__name__,
        utils.concatenate([torch.ones(1, 1), torch.zeros(1, 2)], dim=1).tolist(),
        utils.listify(utils.recursively_apply(lambda tensor, by: tensor * by, tree, 3)),
        utils.recursively_apply(lambda n, more=0: n + more, [1, ("a", 2)], test_type=lambda n: n == 2, more=5),
        utils.listify(utils.slice_tensors(tensors, slice(1, 3))),
        utils.find_batch_size(tensors),
        str(utils.find_device({"text": "a", "tensor": torch.ones(1)})),
        utils.find_device(["a"]),
        utils.honor_type(Pair(1, 2), iter([3, 4])),
        utils.honor_type((1,), iter([2, 3])),
        [utils.is_torch_tensor(item) for item in (torch.ones(1), [1])],
        [str(half[name].dtype) for name in half],
        str(utils.convert_outputs_to_fp32(lambda x: x.bfloat16())(torch.ones(1)).dtype),
        utils.release_memory(1, 2),
    ]


def surroundings(api: str) -> Any:
    """Environment variables, packages and versions."""
    utils = importlib.import_module(f"{api}.utils")
    found: list[Any] = []
    with utils.patch_environment(notebook_accel_test=3, other="yes"):
        found += [os.environ["NOTEBOOK_ACCEL_TEST"], utils.parse_flag_from_env("OTHER")]
        found += [utils.get_int_from_env(["NOT_SET", "NOTEBOOK_ACCEL_TEST"], 1), utils.parse_choice_from_env("OTHER")]
        with utils.clear_environment():
            found += [len(os.environ), utils.parse_flag_from_env("OTHER", True), utils.get_int_from_env(["OTHER"], 1)]
        found.append(os.environ["OTHER"])
    found += ["OTHER" in os.environ, utils.str_to_bool("On"), utils.str_to_bool("n", to_bool=True)]
    for package in ("cuda", "bf16", "mps", "npu", "xpu", "torch_xla", "tensorboard", "wandb", "pandas"):
        found.append(bool(getattr(utils, f"is_{package}_available")()))
    found += [utils.is_torch_version(">=", "2.9"), utils.is_torch_version("<", "2.9")]
    found += [utils.compare_versions("numpy", ">", "1.0"), utils.compare_versions("numpy", "==", "1.0")]
    return found


def models(api: str) -> Any:
    utils = importlib.import_module(f"{api}.utils")
    accelerator = accelerator_of(api)
    model = torch.nn.Linear(2, 1)
    compiled = torch.compile(model, backend="eager")
    net = accelerator.prepare(compiled)
    return [
        accelerator.unwrap_model(net) is compiled,
        utils.extract_model_from_parallel(net) is compiled,
        [utils.is_compiled_module(item) for item in (model, compiled)],
        sorted(accelerator.get_state_dict(accelerator.prepare(torch.nn.Linear(2, 1)))),
        [accelerator.prepare_model(torch.nn.Linear(2, 1), evaluation_mode=True).training],
        len(accelerator.prepare(torch.nn.Linear(2, 1), "text", device_placement=[False, None])),
    ]


def settings(api: str) -> Any:
    accelerator = accelerator_of(api, split_batches=True, even_batches=False, non_blocking=True)
    names = (
        "split_batches dispatch_batches even_batches use_seedable_sampler non_blocking use_stateful_dataloader "
        "multi_device should_save_model deepspeed_plugin is_fsdp2 parallelism_config is_composable_parallelism_enabled "
        "mixed_precision gradient_accumulation_steps num_processes process_index is_main_process is_last_process "
        "is_local_main_process use_distributed sync_gradients save_iteration optimizer_step_was_skipped"
    )
    return {name: getattr(accelerator, name) for name in names.split()} | {"device": accelerator.device.type}
