"""Functions that this folder's tests run in ranks, which can import them quickly."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import pathlib
import random
import signal
import socket
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

import notebook_accel


def rank() -> int:
    return int(os.environ["RANK"])


def threads() -> tuple[int, int, dict[str, str | None]]:
    """Return the number of threads of torch and of numpy's OpenBLAS, and the variables that set them."""
    import threadpoolctl  # not everywhere where this module is used

    [blas] = [info["num_threads"] for info in threadpoolctl.threadpool_info() if "numpy" in info["filepath"]]
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return torch.get_num_threads(), blas, {name: os.environ.get(name) for name in names}


def shows_compile_times(shows: bool) -> None:
    """Have torch log what it logs about compilations at the process's end, if ``shows``."""
    if shows:
        torch._logging.set_logs(dynamo=logging.INFO)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))


def lacks_compile_times() -> None:
    """Leave with an exit function, and with a torch that has no table of compile times."""
    sys.modules["torch._dynamo.utils"] = types.ModuleType("torch._dynamo.utils")
    atexit.register(print, "left", flush=True)


def note(folder: str, what: str) -> None:
    """Leaves a mark that the test, or another rank, waits for."""
    pathlib.Path(folder, f"{rank()} {what}").touch()


def wait_for(folder: str, mark: str) -> None:
    deadline = time.monotonic() + 60
    while not pathlib.Path(folder, mark).exists():
        assert time.monotonic() < deadline, f"no {mark!r}"
        time.sleep(0.01)


def note_when_it_waits(folder: str) -> None:
    """Notes ``waits`` as soon as the main thread has been in one and the same call for a while."""
    main = threading.main_thread().ident
    assert main is not None
    place, since = None, time.monotonic()
    while time.monotonic() - since < 0.3:
        frame = sys._current_frames()[main]
        if place != (id(frame), frame.f_lasti):
            place, since = (id(frame), frame.f_lasti), time.monotonic()
        time.sleep(0.01)
    note(folder, "waits")


def _sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)


def meets(how: str, taken: int, folder: str) -> list[float]:
    """Make two groups, one after the other, at an address of the program's own. Return the sum of each one's ranks."""
    by_number = {"rank": rank(), "world_size": int(os.environ["WORLD_SIZE"])}
    if how in ("variables", "port"):
        os.environ.update({"MASTER_PORT": str(taken), **({"MASTER_ADDR": "localhost"} if how == "variables" else {})})
    if how == "random port":
        os.environ["MASTER_PORT"] = str(12000 + rank())
    sums = []
    for number in range(2):
        options = {
            "variables": by_number,
            "env": {"init_method": "env://"},
            "tcp": {"init_method": f"tcp://localhost:{taken}", **by_number},
            "nowhere": {"init_method": "tcp://nowhere.invalid:1", **by_number},
            "file": {"init_method": f"file://{folder}/{number}", **by_number},
            "halves": {"init_method": f"tcp://localhost:{1 + rank() // 2}", "rank": rank() % 2, "world_size": 2},
        }
        dist.init_process_group("gloo", **options.get(how, {}))
        sums.append(_sum_of_ranks())
    return sums


def meets_as_a_process_of_its_own(member: int, port: int) -> None:
    if port:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=member, world_size=2)
    assert _sum_of_ranks() == 3.0


def starts_processes(method: str, port: int) -> int:
    """Rank 0 starts two processes, which are a group of their own."""
    if rank() == 0:
        start: Any = torch.multiprocessing.start_processes  # type: ignore[attr-defined]
        start(meets_as_a_process_of_its_own, (port,), nprocs=2, start_method=method)
    return rank()


def joins_as(member: int, world_size: int) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="12355")
    dist.init_process_group("gloo", rank=member, world_size=world_size)


def serves_another_group(port: int) -> list[float]:
    """Beside the group of the ranks, make the store of another one, as two processes do that don't know each other."""
    dist.init_process_group("gloo")
    [(store, _, _)] = [next(dist.rendezvous(f"tcp://127.0.0.1:{port}", rank(), 2))]
    store.set(f"from {rank()}", str(rank()))
    seen = float(store.get(f"from {1 - rank()}"))
    return [store.port == port, seen, _sum_of_ranks()]


def _draw() -> dict[str, float]:
    return {
        "python": random.random(),
        "numpy": float(numpy.random.rand()),
        "torch": torch.rand(()).item(),
    }


def draws(seeds: list[str], begins: str) -> list[dict[str, float]]:
    """Return numbers that are drawn twice before the training begins, and at least twice after that."""
    if "python" in seeds:
        random.seed(1)
    if "numpy" in seeds:
        numpy.random.seed(1)
    if "torch" in seeds:
        torch.manual_seed(1)
    if "states" in seeds:
        random.setstate(random.Random(1).getstate())
        numpy.random.set_state(numpy.random.RandomState(1).get_state())
        torch.set_rng_state(torch.Generator().manual_seed(1).get_state())
    drawn = [_draw()]
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    notebook_accel.estimate_memory(model, num_processes=2)  # which steps an optimizer, and trains nothing
    drawn.append(_draw())
    if begins == "prepare":
        model, optimizer = notebook_accel.Accelerator().prepare(model, optimizer)
        drawn.append(_draw())
    elif begins == "compiled step":
        model = torch.compile(model, backend="eager")
    for _ in range(2):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        drawn.append(_draw())
    return drawn


class Drawing(Dataset[torch.Tensor]):
    """A dataset whose items are their index and a draw from each generator, as an augmentation makes them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, *_draw().values()], dtype=torch.float64)


class DrawingStream(IterableDataset[torch.Tensor]):
    """A dataset that draws its order itself, of which each rank may take a share."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.randperm(8))


def reads(how: str) -> list[list[float]]:
    """Return the indices of an epoch and what the workers draw for them, from a generator that is alike everywhere."""
    generator, stream = torch.Generator().manual_seed(1), how == "stream"
    data: Any = DrawingStream() if stream else Drawing()
    loader: Any = DataLoader(data, 2, shuffle=None if stream else True, num_workers=2, generator=generator)
    if how in ("prepared", "shared"):
        config = notebook_accel.ParallelismConfig(tp_size=2) if how == "shared" else None
        loader = notebook_accel.Accelerator(parallelism_config=config).prepare(loader)
    rows = torch.cat(list(loader))
    return rows.reshape(len(rows), -1).T.tolist()


def wait_for_each_other(how: str, folder: str) -> None:
    """Both ranks wait, in C++ code, for what the other will never do."""
    mine, other = torch.ones(3), 1 - rank()
    noting = threading.Thread(target=note_when_it_waits, args=(folder,), daemon=True)
    if how == "joining":
        noting.start()
        if rank() == 0:
            dist.init_process_group("gloo")
        time.sleep(60)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = model(torch.ones(1, 4)).sum()
    noting.start()
    if rank() == 1 or how == "recv":
        dist.recv(mine, other)
    elif how == "all_reduce":
        dist.all_reduce(mine)
    elif how == "backward":
        loss.backward()
    elif how == "store":
        dist.distributed_c10d._get_default_store().get("never set")


def interrupted_in(how: str, folder: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as mine:
        accepted, _ = server.accept()
        try:
            try:
                wait_for_each_other(how, folder)
            finally:
                note(folder, "finally")  # a call: where an interrupt would come that is late
        except KeyboardInterrupt:
            mine.sendall(b"x")  # raises if somebody has shut it down
            assert accepted.recv(1) == b"x"
            note(folder, "except")
            raise
        finally:
            accepted.close()


def computes_until_it_is_interrupted(folder: str) -> str:
    """Makes no call in which Python looks for signals by itself."""
    try:
        note(folder, "computes")
        while True:
            sum(n for n in range(1000))
    except KeyboardInterrupt:
        return "KeyboardInterrupt"


def finalizes_until_it_is_interrupted(folder: str) -> str:
    """Is interrupted in a finalizer, whose exceptions Python ignores."""

    class Finalized:
        def __del__(self) -> None:
            note(folder, "finalizes")
            time.sleep(1000)

    try:
        Finalized()
        time.sleep(1000)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    return "nothing"


def goes_on_after_an_interrupt(folder: str) -> float:
    """Brought out of a collective, destroys the group, makes another, and uses it."""
    try:
        wait_for_each_other("recv", folder)
    except KeyboardInterrupt:
        dist.destroy_process_group()
    note(folder, "is out")
    wait_for(folder, f"{1 - rank()} is out")
    dist.init_process_group("gloo")
    total = torch.tensor(float(rank() + 1))
    dist.all_reduce(total)
    return float(total)


def handles_it_itself(folder: str) -> float:
    """SIGINT is a wish to this one, such as to end after the epoch; what it waits for comes all the same."""
    signal.signal(signal.SIGINT, lambda *_: note(folder, "was asked"))
    dist.init_process_group("gloo")
    received = torch.zeros(1)
    note(folder, "waits")
    if rank() == 0:
        dist.recv(received, 1)
    else:
        wait_for(folder, "1 was asked")
        time.sleep(1.0)  # longer than anybody is patient
        dist.send(torch.tensor([7.0]), 0)
    wait_for(folder, f"{rank()} was asked")
    return float(received)


def says_whether_it_was_interrupted() -> str:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    return "nothing"


def dies_the_first_time(folder: str, who: int, how: str) -> tuple[int, float]:
    """One rank dies; when it is there again, all make a group. Each rank's pid and the sum over the ranks."""
    if rank() == who and not pathlib.Path(folder, f"{who} was here").exists():
        note(folder, "was here")
        if how == "raise":
            raise ValueError("the first time")
        os._exit(3)
    if rank() == who:
        note(folder, "is here again")
    wait_for(folder, f"{who} is here again")
    dist.init_process_group("gloo")
    total = torch.tensor(float(rank() + 1))
    dist.all_reduce(total)
    return os.getpid(), float(total)


def waits(folder: str = "") -> int:
    if folder:
        note(folder, "waits")
    time.sleep(600)  # longer than any test
    return rank()


def oom_score() -> int:
    return int(pathlib.Path("/proc/self/oom_score_adj").read_text())


def takes_memory(size_bytes: int) -> int:
    if rank() == 1:
        return len(bytearray(os.urandom(1)) * size_bytes)
    time.sleep(60)
    return 0


def leaves_a_daemon_behind(folder: str) -> None:
    """A process in a session of its own goes on writing to this rank's standard output, until there is a mark."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.alarm(120)
            while not pathlib.Path(folder, "end").exists():
                os.write(1, b"from the daemon\n")
                note(folder, "daemon writes")
                time.sleep(0.001)
        os._exit(0)
    wait_for(folder, "0 daemon writes")
    for number in range(1000):
        print("line", number)


def one_dies_while_all_train(how: str) -> None:
    """In the middle of a step, so that the others lose their connections to it before anybody knows why."""
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    for step in range(10_000):
        if rank() == 1 and step == 20:
            if how == "exit":
                os._exit(5)
            try:
                raise ValueError("its own reason")
            finally:
                dist.destroy_process_group()  # which the others notice first
        model(torch.ones(8, 256)).sum().backward()


def has_workers(method: str, folder: str) -> None:
    """DataLoader workers that are started by ``method``, with which multiprocessing keeps semaphores in /dev/shm."""
    batches = iter(DataLoader(range(10_000), num_workers=1, multiprocessing_context=method))  # type: ignore[arg-type]
    next(batches)
    note(folder, "has workers")
    time.sleep(60)


def forgets_to_end_forks() -> list[int]:
    """Forks go on in the rank's own code and end it; the rank prints their exit statuses and returns its pid."""
    for end in (None, ValueError("raised in a fork"), SystemExit(7), SystemExit("said at its exit")):
        pid = os.fork()
        if pid == 0:
            if end is None:
                return []
            raise end
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return [os.getpid()]


def collects_in_a_fork() -> tuple[int, bool, bool]:
    """A group is garbage at the fork. The fork's exit status, and whether each collects what becomes garbage."""

    class Held:
        pass

    def make_garbage(held: object) -> weakref.ref[object]:
        cycle = [held]
        cycle.append(cycle)
        return weakref.ref(held)

    def is_collected() -> bool:
        garbage = make_garbage(Held())
        gc.collect()
        return garbage() is None

    dist.init_process_group("gloo")
    dist.barrier()
    gc.disable()
    make_garbage(dist.group.WORLD)
    dist.destroy_process_group()
    gc.enable()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)  # which ends it if it waits for the threads of the rank's group
        os._exit(0 if is_collected() else 1)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), is_collected(), gc.isenabled()


def saves_at_sigterm(folder: str) -> None:
    """Takes its time to save, as what runs under a cluster's scheduler may, and says when it has."""

    def save(*_: object) -> None:
        note(folder, "was asked")
        wait_for(folder, "go")
        note(folder, "has saved")
        os._exit(0)

    signal.signal(signal.SIGTERM, save)
    note(folder, "trains")
    time.sleep(120)


def reports_until(mark: str, returned: object = None, pause_s: float = 0.02) -> tuple[int, int, object]:
    """Prints and reports its steps until the file is there; its rank, its number of steps, and the argument."""
    step, deadline = 0, time.monotonic() + 100
    while not pathlib.Path(mark).exists():
        assert time.monotonic() < deadline, f"no {mark}"
        notebook_accel.report(loss=1 / (step + 1))
        print(f"step {step}")
        step += 1
        time.sleep(pause_s)
    return rank(), step, returned


def is_alone_in_a_collective() -> None:
    """Rank 0 enters a broadcast for which the other rank never comes."""
    dist.init_process_group("gloo")
    number = torch.ones(1)
    dist.all_reduce(number)
    print("all have met", flush=True)
    if os.environ["RANK"] == "0":
        dist.broadcast(number, 1)
    time.sleep(300)
