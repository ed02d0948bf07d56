"""Functions that ranks run in the tests of this folder, where torch_xla is installed."""

from __future__ import annotations

import os
import pathlib
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody writes it
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from notebook_accel import Accelerator, host_memory
from notebook_accel.reporting import reporter
from notebook_accel.training.backends import xla, xla_collectives
from notebook_accel.utils import broadcast, set_seed
from tests import processes
from tests.training import test_turns


def data(count: int = 64) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > x[:, 1]).long())


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2))


def executions() -> int:
    """Return the number of graphs that the device has computed by now."""
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics

    xm.wait_device_ops()
    found = metrics.metric_data("ExecuteTime")
    return int(found[0]) if found else 0


def values_read() -> int:
    """Return the number of values that were read back from the device by now."""
    import torch_xla.debug.metrics as metrics

    found = metrics.metric_data("TransferFromDeviceTime")
    return int(found[0]) if found else 0


def train(*, epochs: int = 2, steps: int = 1, batch: int = 16) -> dict[str, Any]:
    """Trains; the device, the parameters' identity, and of each batch whether it is said to compile, and counts."""
    set_seed(3)
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    own = model()
    parameters = [*own.parameters()]
    optimizer = torch.optim.Adam(own.parameters(), lr=0.05)
    net, optimizer, loader = accelerator.prepare(own, optimizer, DataLoader(data(), batch_size=batch, shuffle=True))
    says, compiled, executed, losses = [], [], [], []
    for _ in range(epochs):
        for x, y in loader:
            says.append(reporter().is_compiling)
            with accelerator.accumulate(net):
                loss = F.cross_entropy(net(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            compiled.append(xla.compiled_count())
            executed.append(executions())
            losses.append(loss.detach())
    return {
        "device": str(accelerator.device),
        "kept": all(a is b for a, b in zip(parameters, own.parameters(), strict=True)),
        "on_device": all(parameter.device == accelerator.device for parameter in own.parameters()),
        "says": says,
        "compiled": [count - compiled[0] for count in compiled],
        "executed": executed,
        "losses": [float(loss) for loss in losses],
        "threads": [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()],
    }


def transfers(steps: int) -> tuple[int, int]:
    """Values read back from the device in two epochs of accumulation, and batches in them."""
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    own = model()
    net, optimizer, loader = accelerator.prepare(
        own, torch.optim.SGD(own.parameters(), lr=0.1), DataLoader(data(), batch_size=4)
    )
    before, batches = values_read(), 0
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(net):
                accelerator.backward(F.cross_entropy(net(x), y))
                optimizer.step()
                optimizer.zero_grad()
            batches += 1
    return values_read() - before, batches


def resume(folder: pathlib.Path) -> tuple[list[float], list[float]]:
    """Losses of the batches after a checkpoint in the middle of an epoch: uninterrupted, and resumed."""

    def losses(*, resumed: bool) -> list[float]:
        set_seed(5)
        accelerator = Accelerator()
        own = model()
        optimizer = torch.optim.Adam(own.parameters(), lr=0.05)
        net, optimizer, loader = accelerator.prepare(own, optimizer, DataLoader(data(), batch_size=8, shuffle=True))
        if resumed:
            accelerator.load_state(folder)
        found = []
        for number, (x, y) in enumerate(loader):
            loss = F.cross_entropy(net(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
            if number == 2 and not resumed:
                accelerator.save_state(folder)
                found.clear()
        return [float(loss) for loss in found]

    return losses(resumed=False), losses(resumed=True)


def leaf() -> tuple[str, float, bool]:
    """A bare tensor that learns without a loader: its device, its value after two steps, and whether it is the same."""
    weight = torch.tensor([1.0], requires_grad=True)
    optimizer: Any = torch.optim.SGD([weight], lr=0.5)
    accelerator = Accelerator()
    prepared, optimizer = accelerator.prepare(weight, optimizer)
    for _ in range(2):
        accelerator.backward((prepared**2).sum() / 2)
        optimizer.step()
        optimizer.zero_grad()
    return str(prepared.device), float(prepared.detach()), prepared is weight


class _Nested(Dataset[Any]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise ValueError("no such image")
        return {"x": (torch.full((2,), float(index)), index), "name": f"image {index}"}


def nested() -> tuple[list[Any], str]:
    """Return the batches of a loader of nested batches, and the error of a loader that fails."""
    accelerator = Accelerator()
    seen: list[Any] = []
    try:
        for batch in accelerator.prepare(DataLoader(_Nested(), batch_size=2)):
            rows, numbers = batch["x"]
            seen.append((str(rows.device), rows.tolist(), numbers.tolist(), batch["name"]))
    except ValueError as error:
        return seen, str(error).splitlines()[-1]
    return seen, ""


def _pack(rows: list[torch.Tensor]) -> PackedSequence:
    return pack_sequence(rows, enforce_sorted=False)


def packed() -> tuple[str, str]:
    """Where the two parts of a packed batch come to lie."""
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader([torch.ones(2), torch.ones(3)], batch_size=2, collate_fn=_pack))  # type: ignore[arg-type]
    [batch] = list(loader)
    return str(batch.data.device), str(batch.batch_sizes.device)


def warned() -> list[str]:
    """The warnings of a training whose last batch is shorter, and of an evaluation with another batch size, twice."""
    accelerator = Accelerator()
    short, evaluation = accelerator.prepare(DataLoader(data(24), batch_size=16), DataLoader(data(24), batch_size=12))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for loader in (short, evaluation):
                for x, _ in loader:
                    (x * 2).sum()
    return [str(warning.message) for warning in caught if "XLA compiles" in str(warning.message)]


def dtypes(downcast: bool) -> tuple[str, str, str, float]:
    """Return what float32 and float64 are on the device, the precision's name, and a loss after training."""
    import torch_xla

    accelerator = Accelerator(mixed_precision="bf16", downcast_bf16=downcast)
    single, double = torch.ones(2).to(accelerator.device), torch.ones(2, dtype=torch.float64).to(accelerator.device)
    texts = [torch_xla._XLAC._get_xla_tensors_text([tensor + 1]) for tensor in (single, double)]
    made = [text.partition("xla_shape=")[2].partition("[")[0] for text in texts]
    own = model()
    net, optimizer, loader = accelerator.prepare(
        own, torch.optim.Adam(own.parameters(), lr=0.05), DataLoader(data(), batch_size=16)
    )
    for _ in range(10):
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return made[0], made[1], accelerator.mixed_precision, float(loss.detach())


def other_precision() -> None:
    """A second Accelerator in the other form of bf16."""
    Accelerator(mixed_precision="bf16", downcast_bf16=True)
    Accelerator(mixed_precision="bf16")


def alone() -> list[Any]:
    """Return the results of one rank's collectives."""
    accelerator = Accelerator()
    x = torch.arange(3, device=accelerator.device)
    accelerator.wait_for_everyone()
    gathered, total = accelerator.gather(x), accelerator.reduce(x, reduction="sum")
    accelerator.print("printed:", total)
    return [
        gathered.tolist(),
        total.tolist(),
        broadcast({"x": x})["x"].tolist(),
        accelerator.gather_for_metrics(["a"], use_gather_object=True),
    ]


def seeded() -> tuple[list[float], list[float], list[float]]:
    """Numbers that the device draws: after a seed, after another, after the first again and a wait for other ranks."""
    accelerator = Accelerator()

    def drawn(seed: int, *, waits: bool = False) -> list[float]:
        set_seed(seed)
        if waits:
            accelerator.wait_for_everyone()
        numbers: list[float] = torch.rand(3, device=accelerator.device).tolist()
        return numbers

    return drawn(1), drawn(2), drawn(1, waits=True)


# Two devices of one process, each used by a thread --------------------------------------------------------------------


def _on_two_devices(work: Callable[[int, torch.device], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Return the results of ``work(rank, device)`` in two threads, computed together and then read."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla._internal import pjrt

    if not torch_xla._XLAC._xla_runtime_is_initialized():
        pjrt.initialize_multiprocess(0, 1)
    devices = xm.get_xla_supported_devices()
    found: dict[int, list[torch.Tensor]] = {}
    # Ranks that compile one program at the same time would compile two, whose collectives don't meet on the CPU.
    compiles = threading.Lock()

    def run(rank: int) -> None:
        torch_xla._XLAC._xla_set_default_device(devices[rank])
        tensors = work(rank, torch.device(devices[rank]))
        with compiles:
            torch_xla._XLAC._xla_step_marker(devices[rank], [], wait=False, reset_scope=True)
        found[rank] = [tensor.detach().cpu() for tensor in tensors]
        torch_xla._XLAC._set_all_reduce_token(devices[rank], None)  # as the end of a step does

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(2)]


def collectives() -> list[list[torch.Tensor]]:
    """Each rank's sum, gathered tensors of several types, and rank 1's values."""

    def work(rank: int, device: torch.device) -> list[torch.Tensor]:
        total = torch.tensor([1.0 + rank, 2.0]).to(device)
        rows = torch.tensor([[rank, 10.0 * rank], [float("inf"), 0.0]]).to(device)
        flags = torch.tensor([rank == 0, True]).to(device)
        received = torch.tensor([rank, 7]).to(device)
        between = xla_collectives.BetweenDevices(rank, 2)
        between.all_reduce([total])
        gathered = [between.all_gather(tensor) for tensor in (rows, flags)]
        between.broadcast([received], source=1)
        return [total, *gathered, received]

    return _on_two_devices(work)


def gradients() -> tuple[list[list[torch.Tensor]], list[int]]:
    """Each rank's gradient with and without ``no_sync``, and the all-reduces of a synchronised backward pass."""
    counts: list[int] = []

    def work(rank: int, device: torch.device) -> list[torch.Tensor]:
        import torch_xla

        net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).to(device)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(1.0)
        parallel = xla_collectives.XlaDataParallel(net, 2, xla_collectives.BetweenDevices(rank, 2))
        x = torch.full((1, 2), 1.0 + rank).to(device)
        with parallel.no_sync():
            parallel(x).sum().backward()
        own = net[0].weight.grad.clone()
        net.zero_grad()
        parallel(x).sum().backward()
        synced = [parameter.grad for parameter in net.parameters()]
        counts.append(torch_xla._XLAC._get_xla_tensors_hlo(synced).count(" all-reduce("))
        return [own, net[0].weight.grad]

    return _on_two_devices(work), counts


def gradients_of_a_model_that_changes() -> list[list[torch.Tensor]]:
    """Each rank's gradients of a layer that was unfrozen, and of one that was added, with that layer's weights."""

    def work(rank: int, device: torch.device) -> list[torch.Tensor]:
        net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).to(device)
        net[0].requires_grad_(False)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(1.0)
        parallel = xla_collectives.XlaDataParallel(net, 2, xla_collectives.BetweenDevices(rank, 2))
        x = torch.full((1, 2), 1.0 + rank).to(device)
        parallel(x).sum().backward()
        net.zero_grad()
        net[0].requires_grad_(True)
        added = torch.nn.Linear(1, 1, bias=False).to(device)
        torch.nn.init.constant_(added.weight, 2.0 + rank)
        net.append(added)
        parallel(x).sum().backward()
        return [net[0].weight.grad, added.weight.grad, added.weight.detach()]

    return _on_two_devices(work)


# Two processes with a device each -------------------------------------------------------------------------------------


class _Meeting(torch.nn.Linear):
    """A model that, while it is moved, waits until it can tell what the other rank does.

    Args:
        folder: Where both leave notes.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__(64, 64)
        self._own, self._other = folder / os.environ["LOCAL_RANK"], folder / str(1 - int(os.environ["LOCAL_RANK"]))
        self._own.with_suffix(".pid").write_text(str(os.getpid()))
        self.seen = ""

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = "gone" if self._other.with_suffix(".out").exists() else ""
        self._own.with_suffix(".in").touch()
        self.seen = self.seen or processes.wait_until(self._what_the_other_does, "the other rank does something")
        moved = super()._apply(*args, **kwargs)
        self._own.with_suffix(".out").touch()
        return moved

    def _what_the_other_does(self) -> str:
        if self._other.with_suffix(".in").exists():
            return "moving"
        pid = self._other.with_suffix(".pid")
        return "waiting" if pid.exists() and pid.read_text() and test_turns.is_waiting(int(pid.read_text())) else ""


def move_beside_another(folder: pathlib.Path, available_bytes: int) -> tuple[str, str]:
    """Return what the other rank does while this rank's model moves to the device, and the device it ends on."""
    host_memory.available_bytes = lambda: available_bytes
    model = Accelerator().prepare(_Meeting(folder))
    return model.seen, str(model.weight.device)
