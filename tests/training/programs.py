"""Programs like those in Accelerate's documentation, with the library's name left open.

Each returns its results in a form that can be compared.
"""

from __future__ import annotations

import contextlib
import importlib
import pathlib
from collections.abc import Iterator
from typing import Any

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


def rest(api: str, kind: str, **options: Any) -> list[Any]:
    """Return the rest of an epoch without its first batches, and the whole epoch after it."""
    skip_first_batches = importlib.import_module(api).skip_first_batches
    found = []
    for skipped in (0, 1, 2):
        loader = accelerator_of(api, **options).prepare(loader_of(kind, 22, 4))
        found.append([batch.tolist() for batch in skip_first_batches(loader, skipped)])
        found.append([batch.tolist() for batch in loader])
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


def without_end(api: str, **options: Any) -> Any:
    """Count steps instead of epochs, and change the number of micro-batches on the way."""
    accelerator = accelerator_of(api, num_steps=2, **options)
    model, x, y = materials()
    net, optimizer, loader = accelerator.prepare(
        model, torch.optim.Adam(model.parameters(), lr=0.01), loader_of("numbers", 22, 4)
    )

    def forever() -> Iterator[Any]:
        while True:
            yield from loader

    batches, synced = forever(), []
    for step in range(9):
        if step == 4:
            accelerator.gradient_accumulation_steps = 3
        rows = next(batches)
        with accelerator.accumulate(net):
            accelerator.backward(F.cross_entropy(net(x[rows]), y[rows]))
            optimizer.step()
            optimizer.zero_grad()
        synced.append(accelerator.sync_gradients)
    batches.close()
    return synced, weights_of(accelerator.unwrap_model(net))


def by_hand(api: str) -> Any:
    """Accumulate gradients with ``no_sync``, weighted by the number of samples in a whole window."""
    accelerator = accelerator_of(api, num_steps=2)
    model, x, y = materials()
    net, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader_of("numbers", 20, 4)
    )
    batches = iter(loader)
    for window in range(-(-len(loader) // 2)):
        rows_of = [next(batches) for _ in range(min(2, len(loader) - 2 * window))]
        count = int(accelerator.gather(torch.tensor([sum(map(len, rows_of))])).sum())
        for rows in rows_of:
            with accelerator.no_sync(net) if rows is not rows_of[-1] else contextlib.nullcontext():
                loss = F.cross_entropy(net(x[rows]), y[rows], reduction="sum")
                accelerator.backward(loss * 2 * accelerator.num_processes / count)
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(accelerator.unwrap_model(net))


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


def local_sgd(api: str, *, enabled: bool) -> Any:
    accelerator = accelerator_of(api, num_steps=2)
    model, x, y = materials()
    net, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.5), loader_of("numbers", 40, 3)
    )
    seen = []
    kind = importlib.import_module(f"{api}.local_sgd").LocalSGD
    with kind(accelerator=accelerator, model=net, local_sgd_steps=3, enabled=enabled) as local:
        for rows in loader:
            with accelerator.accumulate(net):
                accelerator.backward(F.cross_entropy(net(x[rows]), y[rows]))
                optimizer.step()
                optimizer.zero_grad()
                local.step()
            seen.append(weights_of(model))
    return seen, weights_of(model)


def tutorial(api: str, **options: Any) -> Any:
    """Run the notebook tutorial's loop: a frozen layer, one cycle, an evaluation after each epoch."""
    importlib.import_module(f"{api}.utils").set_seed(42)
    accelerator = accelerator_of(api, **options)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    model[0].requires_grad_(False)
    x, y = torch.randn(40, 4), torch.randint(0, 3, (40,))
    training_loader, test_loader = loader_of("numbers", 40, 5), loader_of("numbers", 13, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2 / 25)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=3e-2, epochs=2, steps_per_epoch=len(training_loader))
    model, optimizer, training_loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, training_loader, test_loader, scheduler
    )
    found = []
    for _ in range(2):
        model.train()
        for rows in training_loader:
            accelerator.backward(F.cross_entropy(model(x[rows]), y[rows]))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        for rows in test_loader:
            with torch.no_grad():
                outputs = model(x[rows])
            found.append([part.tolist() for part in accelerator.gather_for_metrics((outputs, y[rows]))])
    return found, scheduler.get_last_lr()


def checkpoints(api: str, folder: str) -> Any:
    """Run the checkpoint tutorial: save a state in the middle of an epoch, and train from it again."""
    accelerator = accelerator_of(api)
    path = pathlib.Path(folder, api)
    model, x, y = materials()
    scheduled = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = SCHEDULES["StepLR"](scheduled)
    net, optimizer, loader = accelerator.prepare(model, scheduled, loader_of("numbers", 40, 4))
    accelerator.register_for_checkpointing(scheduler)

    def train(batches: Any, *, saves: bool = False) -> Any:
        for step, rows in enumerate(batches):
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(net(x[rows]), y[rows]))
            optimizer.step()
            if saves and step == 1:
                accelerator.save_state(str(path))
        scheduler.step()
        return weights_of(model), scheduler.get_last_lr()

    without_pause = train(loader, saves=True)
    accelerator.load_state(str(path))
    again = train(accelerator.skip_first_batches(loader, 2))
    return without_pause, again


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


class Blocks(torch.nn.Module):
    """A model with repeated blocks between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(3))
        self.last = torch.nn.Linear(6, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.first(rows)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.last(hidden)
        return logits


def compiled(api: str, given: Any, **options: Any) -> Any:
    """Train a model that ``prepare`` compiles, with accumulation, and evaluate it.

    Args:
        api: The library's name.
        given: The arguments of ``TorchDynamoPlugin``, or the name of a backend.
        options: The options of ``accelerator_of``.
    """
    library, utils = importlib.import_module(api), importlib.import_module(f"{api}.utils")
    torch._dynamo.reset()
    if api == "accelerate":
        importlib.import_module("accelerate.state").AcceleratorState._reset_state()
    said = {"dynamo_backend": given} if isinstance(given, str) else {"dynamo_plugin": utils.TorchDynamoPlugin(**given)}
    accelerator = library.Accelerator(cpu=True, gradient_accumulation_steps=2, **said, **options)
    torch.manual_seed(1)
    model, x, y = Blocks(), torch.randn(24, 4), torch.randint(0, 3, (24,))
    net, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loader_of("numbers", 24, 4)
    )
    for _ in range(2):
        for rows in loader:
            with accelerator.accumulate(net):
                accelerator.backward(F.cross_entropy(net(x[rows]), y[rows]))
                optimizer.step()
                optimizer.zero_grad()
    net.eval()
    with torch.no_grad():
        logits = accelerator.gather(net(x[:4])).tolist()
    plugin = accelerator.state.dynamo_plugin
    return [weights_of(model), logits, plugin.to_kwargs(), plugin.to_dict(), utils.is_compiled_module(net)]


def tracking(api: str) -> Any:
    """Run the tracking tutorial with its custom tracker."""
    module = importlib.import_module(f"{api}.tracking")
    said: list[Any] = []

    class Tracker(module.GeneralTracker):  # type: ignore[name-defined,misc]  # of either library
        name = "mine"
        requires_logging_directory = False

        @module.on_main_process  # type: ignore[untyped-decorator]
        def __init__(self, run_name: str) -> None:
            super().__init__()
            said.append(run_name)

        @property
        def tracker(self) -> Any:
            return said

        @module.on_main_process  # type: ignore[untyped-decorator]
        def store_init_configuration(self, values: dict[str, Any]) -> None:
            said.append(values)

        @module.on_main_process  # type: ignore[untyped-decorator]
        def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
            said.append((values, step, kwargs))

    accelerator = importlib.import_module(api).Accelerator(cpu=True, log_with=Tracker("some_run"))
    accelerator.init_trackers("my_project", config={"num_iterations": 5, "learning_rate": 1e-2})
    accelerator.log({"train_loss": 1.12, "valid_loss": 0.8}, step=1, log_kwargs={"mine": {"more": 2}})
    if accelerator.is_main_process:
        accelerator.get_tracker("mine", unwrap=True).append("by hand")
    return said
