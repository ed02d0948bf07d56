"""Programs like those in Accelerate's documentation, with the library's name left open.

Each returns its results in a form that can be compared.
"""

from __future__ import annotations

import importlib
import os
import pathlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch.optim import lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from tests.training.datasets import Numbers, Stream

LENGTHS = (1, 3, 7, 8, 12, 13)


def accelerator_of(
    api: str, *, num_steps: int = 1, plugin: dict[str, Any] | None = None, precision: str = "no", **loading: Any
) -> Any:
    utils = importlib.import_module(f"{api}.utils")
    if api == "accelerate":
        importlib.import_module("accelerate.state").AcceleratorState._reset_state()  # or the first precision stays
    return importlib.import_module(api).Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_plugin=utils.GradientAccumulationPlugin(num_steps=num_steps, **(plugin or {})),
        dataloader_config=utils.DataLoaderConfiguration(**loading),
    )


def loader_of(kind: str, n: int, size: int) -> DataLoader[Any]:
    batches = BatchSampler(SequentialSampler(range(n)), size, drop_last=True)
    made: dict[str, Any] = {
        "numbers": lambda: DataLoader(Numbers(n), batch_size=size),
        "drop last": lambda: DataLoader(Numbers(n), batch_size=size, drop_last=True),
        "batch sampler": lambda: DataLoader(Numbers(n), batch_sampler=batches),
        "shuffled": lambda: DataLoader(Numbers(n), batch_size=size, shuffle=True),
        "stream": lambda: DataLoader(Stream(n), batch_size=size),
    }
    loader: DataLoader[Any] = made[kind]()
    return loader


def samples(api: str, kind: str, **options: Any) -> list[Any]:
    """Return the batches of this rank in two epochs, with the states that the program can read meanwhile."""
    found: list[Any] = []
    for n in LENGTHS:
        accelerator = accelerator_of(api, **options)
        torch.manual_seed(n)
        loader = accelerator.prepare(loader_of(kind, n, 4))
        state = accelerator.gradient_state
        for _ in range(2):
            found.append([(batch.tolist(), state.end_of_dataloader, state.in_dataloader) for batch in loader])
        if kind != "stream":
            found.append((len(loader), loader.total_dataset_length))
    return found


def metrics(api: str, kind: str, **options: Any) -> list[Any]:
    """Return the samples gathered in an epoch, as tensors and as objects."""
    found = []
    for n in LENGTHS:
        accelerator = accelerator_of(api, **options)
        torch.manual_seed(n)
        loader = accelerator.prepare(loader_of(kind, n, 4))
        pairs = [accelerator.gather_for_metrics((batch, batch.float() * 2)) for batch in loader]
        objects = [accelerator.gather_for_metrics([str(i) for i in batch.tolist()]) for batch in loader]
        found.append(([[part.tolist() for part in pair] for pair in pairs], objects))
    return found


def materials() -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    return model, torch.randn(40, 4), torch.randint(0, 3, (40,))


def weights_of(model: torch.nn.Module) -> list[Any]:
    return [parameter.detach().tolist() for parameter in model.parameters()]


SCHEDULES: dict[str, Any] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=9),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 7),
}


def training(api: str, n: int, kind: str, schedule: str, **options: Any) -> Any:
    """Accumulate gradients for two epochs; return the state in each micro-batch, and the weights."""
    accelerator = accelerator_of(api, **options)
    model, x, y = materials()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULES[schedule](optimizer)
    net, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader_of(kind, n, 4))
    seen = []
    for _ in range(2):
        for rows in loader:
            with accelerator.accumulate(net):
                loss = F.cross_entropy(net(x[rows]), y[rows])
                accelerator.backward(loss)
                norm = 0.0
                if accelerator.sync_gradients:
                    norm = float(accelerator.clip_grad_norm_(net.parameters(), 0.5))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append((accelerator.sync_gradients, optimizer.param_groups[0]["lr"], norm, scheduler.get_last_lr()))
    return seen, weights_of(accelerator.unwrap_model(net))


def late_sync(api: str) -> Any:
    """Run two forward passes in ``no_sync``, and sync in the backward pass of the second."""
    accelerator = accelerator_of(api)
    model, x, y = materials()
    net = accelerator.prepare(model)
    rank = accelerator.process_index
    with accelerator.no_sync(net):
        losses = [F.cross_entropy(net(x[rows]), y[rows]) for rows in ([rank], [rank + 2])]
    accelerator.backward(losses[0])
    before = [parameter.grad.tolist() for parameter in model.parameters()]
    with accelerator.trigger_sync_in_backward(net):
        accelerator.backward(losses[1])
    return before, [parameter.grad.tolist() for parameter in model.parameters()]


def checkpoint_of_changed_lists(api: str, folder: str) -> Any:
    """Take prepared objects out of the lists that checkpoints are made of, and put them in, as programs do."""
    accelerator = accelerator_of(api)
    teacher, loader = accelerator.prepare(torch.nn.Linear(1, 1), loader_of("numbers", 4, 2))
    model = torch.nn.Linear(2, 1)
    _, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def saved(name: str) -> list[Any]:
        path = pathlib.Path(folder, api, name)
        accelerator.save_state(str(path))
        accelerator.wait_for_everyone()
        lists = (accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders)
        files = sorted(file.name for file in path.iterdir() if file.name.startswith(("model", "optimizer")))
        return [files, [len(prepared) for prepared in lists]]

    found = [saved("all")]
    removed = accelerator._models.pop(0)
    accelerator._dataloaders.pop()
    accelerator._optimizers.clear()
    found.append(saved("less"))
    found.append([accelerator.prepare(loader) is loader, accelerator.prepare(optimizer) is optimizer])
    accelerator._models.append(removed)
    found.append(saved("again"))
    bare = accelerator.unwrap_model(teacher)
    accelerator._models = [item for item in accelerator._models if accelerator.unwrap_model(item) is not bare]
    found.append(saved("without teacher"))
    accelerator.load_state(str(pathlib.Path(folder, api, "without teacher")))
    accelerator.free_memory()
    return [*found, accelerator._models, accelerator._optimizers, accelerator._dataloaders]


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
    assert utils.concatenate(["a batch of text"]) == "a batch of text"
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
    packages = "cuda bf16 mps npu xpu torch_xla tensorboard wandb pandas bnb peft aim clearml dvclive swanlab trackio "
    packages += "amdsmi bitsandbytes_multi_backend import_timer "
    packages += "hpu mlu musa neuron sdaa rocm timm torchvision triton boto3 pynvml weights_only lomo schedulefree"
    for package in packages.split():
        found.append(bool(getattr(utils, f"is_{package}_available")()))
    found += [utils.is_torch_version(">=", "2.9"), utils.is_torch_version("<", "2.9")]
    found += [utils.compare_versions("numpy", ">", "1.0"), utils.compare_versions("numpy", "==", "1.0")]
    return found


def settings(api: str) -> Any:
    accelerator = accelerator_of(api, split_batches=True, even_batches=False, non_blocking=True)
    names = (
        "split_batches dispatch_batches even_batches use_seedable_sampler non_blocking use_stateful_dataloader "
        "multi_device should_save_model deepspeed_plugin is_fsdp2 parallelism_config is_composable_parallelism_enabled "
        "mixed_precision gradient_accumulation_steps num_processes process_index is_main_process is_last_process "
        "is_local_main_process use_distributed sync_gradients save_iteration optimizer_step_was_skipped"
    )
    return {name: getattr(accelerator, name) for name in names.split()} | {"device": accelerator.device.type}


def names(api: str) -> Any:
    """Use what programs reach for beside the documented methods: positional arguments, lists, states, the window."""
    state = importlib.import_module(f"{api}.state")
    accelerator_of(api, precision="bf16")  # Accelerate would refuse the next one after another precision
    accelerator = importlib.import_module(api).Accelerator(True, False, "bf16", 2, True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = torch.utils.data.DataLoader(range(6), batch_size=1)
    net, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    gradients = accelerator.gradient_state
    found: list[Any] = [
        accelerator.mixed_precision,
        accelerator.native_amp,
        accelerator.scaler is None,
        [
            [accelerator.unwrap_model(item) is model for item in accelerator._models],
            accelerator._optimizers == [optimizer],
        ],
        [accelerator._schedulers == [scheduler], accelerator._dataloaders == [loader]],
        state.is_initialized(),
        [state.PartialState().initialized, accelerator.state.initialized, gradients.initialized],
        state.PartialState().backend == ("gloo" if accelerator.num_processes > 1 else None),
        str(state.PartialState().default_device),
    ]
    found.append([gradients.active_dataloader is loader for _ in loader])
    found.append(gradients.active_dataloader)
    before = model.weight.detach().clone()
    for sync in (False, True):
        accelerator.sync_gradients = sync
        accelerator.backward(net(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        found.append((before - model.weight.detach()).tolist())
    state.AcceleratorState._reset_state()
    state.GradientState._reset_state()
    found.append(accelerator_of(api).mixed_precision)
    return found


def settings_that_change(api: str) -> Any:
    """Change settings after they were made, as Accelerate's can be."""
    library, utils = importlib.import_module(api), importlib.import_module(f"{api}.utils")
    accelerator_of(api)
    loading, plugin = utils.DataLoaderConfiguration(), utils.GradientAccumulationPlugin(num_steps=2)
    autocast, parallel = utils.AutocastKwargs(), utils.DistributedDataParallelKwargs()
    loading.split_batches, plugin.num_steps, autocast.enabled = True, 3, False
    parallel.find_unused_parameters = True
    accelerator = library.Accelerator(
        cpu=True, dataloader_config=loading, gradient_accumulation_plugin=plugin, kwargs_handlers=[autocast, parallel]
    )
    return [
        accelerator.split_batches,
        accelerator.gradient_accumulation_steps,
        [autocast.to_kwargs(), parallel.to_kwargs(), autocast.to_dict()],
        isinstance(autocast, utils.KwargsHandler),
    ]


def helpers(api: str) -> Any:
    """Use the small functions of ``utils`` that need no Accelerator of their own."""
    utils = importlib.import_module(f"{api}.utils")
    deep = {name: importlib.import_module(f"{api}.utils.{name}") for name in ("other", "memory", "operations")}
    rank = accelerator_of(api).process_index
    own = torch.arange(3.0) if rank == 0 else None
    structure = utils.get_data_structure({"a": torch.ones(2, 3), "b": [torch.ones(1).half()]})
    made = utils.initialize_tensors(structure)
    return [
        deep["operations"].copy_tensor_to_devices(own).tolist(),
        [tuple(made["a"].shape), str(made["b"][0].dtype), utils.is_tensor_information(structure["a"])],
        [utils.ignorant_find_batch_size([torch.ones(2, 1)]), utils.ignorant_find_batch_size(["a"])],
        [utils.is_namedtuple(Pair(1, 2)), utils.is_namedtuple((1, 2))],
        [utils.convert_bytes(size) for size in (0, 1023, 1536, 3 * 2**30, 2**50)],
        [utils.get_pretty_name(item) for item in (Pair, Pair(1, 2), helpers)],
        utils.merge_dicts({"a": {"b": 1}, "c": 2}, {"a": {"d": 3}, "c": 4}),
        utils.recursive_getattr(torch.nn.Sequential(torch.nn.Linear(2, 1)), "0.weight.shape"),
        [utils.is_port_in_use(1), 0 < deep["other"].get_free_port() < 65536],  # nobody listens on port 1
        [deep["memory"].should_reduce_batch_size(RuntimeError(text)) for text in ("CUDA out of memory.", "shape")],
        deep["memory"].clear_device_cache(garbage_collection=True),
        utils.are_libraries_initialized("torch", "no_such_library"),
        [utils.convert_file_size_to_int(size) for size in (5, "5GB", "1.5GiB", "10 KB")],
        utils.get_max_memory({"cpu": "1GiB", 0: "2GB"}),
        bool(utils.is_peft_model(torch.nn.Linear(1, 1))),
        utils.WEIGHTS_NAME + utils.SAFE_WEIGHTS_INDEX_NAME + utils.SAFE_WEIGHTS_PATTERN_NAME,
    ]
