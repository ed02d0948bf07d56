"""Tests of joining: alone, by the environment, through an existing store, or in the user's own group."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from notebook_accel import PartialState, environment
from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.reporting import reporter
from notebook_accel.training import process_group
from notebook_accel.training.backends import torch_group
from notebook_accel.training.backends.devices import local_device
from notebook_accel.training.handlers import InitProcessGroupKwargs
from tests.training import ranks


@pytest.fixture(scope="module", autouse=True)
def _first_store() -> None:
    """Create what torch keeps from a process's first store on, so that it isn't taken for a test's leak."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@contextlib.contextmanager
def launched(numbers: list[int], world_size: int) -> Iterator[ranks.Ranks]:
    """Ranks of a run, and a launcher's store, which outlives the groups that meet in it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    places = [environment.RankPlace(rank, world_size, rank, world_size, "127.0.0.1", store.port) for rank in numbers]
    running = ranks.Ranks([{**place.variables(), **agent} for place in places])
    try:
        yield running
    finally:
        running.close()


def test_without_ranks_in_the_environment_there_is_no_group() -> None:
    backend = process_group.join()
    assert (backend.place.rank, backend.place.world_size) == (0, 1)
    assert not dist.is_initialized()
    assert reporter()._device == str(backend.device)
    backend.leave()


class Asking(Dataset[tuple[int, int, str]]):
    """A dataset whose items are the places of the rank that they are read for."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[int, int, str]:
        state = PartialState()
        try:
            state.wait_for_everyone()
        except TrainingError as error:
            return state.process_index, state.num_processes, error.what
        return state.process_index, state.num_processes, ""


def read_by_a_worker() -> list[Any]:
    # This process has joined no group, like a worker that isn't a fork of its rank.
    loader: DataLoader[Any] = DataLoader(Asking(), batch_size=None, num_workers=1)
    return list(loader)


def test_a_loaders_worker_is_not_a_further_rank() -> None:
    variables = RankPlace(rank=1, world_size=2, local_rank=1, local_world_size=2, master_port=9).variables()
    with contextlib.closing(ranks.Ranks([variables])) as running:
        (read,) = running.run(read_by_a_worker, deadline_s=30)
    assert read == [[1, 2, "A worker process of a data loader can't communicate with other ranks."]] * 2


def test_world_size_without_a_port() -> None:
    with environment.patched({"RANK": "0", "WORLD_SIZE": "2"}), pytest.raises(ConfigError, match="MASTER_PORT"):
        process_group.join(cpu=True)


def join_twice() -> Any:
    first, second = process_group.join(), process_group.join(cpu=True)
    total = torch.tensor([first.place.rank + 1])
    second.all_reduce(total)
    first.leave()
    still_there = dist.is_initialized()
    second.leave()
    return first.place, total.item(), still_there, dist.is_initialized()


def test_launched_ranks_join_leave_and_join_again() -> None:
    with launched([0, 1], 2) as both:
        for _ in range(3):
            for rank, (place, total, still_there, left_over) in enumerate(both.run(join_twice)):
                assert (place.rank, place.world_size, place.local_rank) == (rank, 2, rank)
                assert total == 3
                assert still_there
                assert not left_over


def join_within(deadline_s: float) -> None:
    process_group.join(cpu=True, options=InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=deadline_s)))


def test_missing_ranks_are_named() -> None:
    with launched([0, 2], 4) as some:
        for rank, error in zip((0, 2), some.replies(join_within, 2.0), strict=True):
            assert isinstance(error, TrainingError)
            assert f"Rank {rank} waited 2 s for the others; missing: rank 1, rank 3." in str(error)


@pytest.mark.slow
def test_nobody_at_the_store() -> None:
    port = ranks.free_port()
    alone = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with environment.patched(alone), pytest.raises(TrainingError, match=f"127.0.0.1:{port} within 1 s"):
        process_group.join(cpu=True, options=InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=1)))


def use_a_group_of_the_users() -> Any:
    dist.init_process_group("gloo")
    backend = process_group.join(cpu=True)
    backend.barrier()
    backend.leave()
    kept = dist.is_initialized()
    dist.destroy_process_group()
    again = process_group.join(cpu=True)
    gathered = again.all_gather_object(again.place.rank)
    again.leave()
    return backend.place.world_size, kept, gathered


def test_the_users_own_group_is_used_and_left_alone() -> None:
    with ranks.running(2) as fresh:
        assert fresh.run(use_a_group_of_the_users) == [(2, True, [0, 1])] * 2


def test_rank_without_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    place = environment.RankPlace(rank=2, world_size=3, local_rank=2, local_world_size=3)
    with pytest.raises(TrainingError, match="Rank 2 has no GPU of its own") as raised:
        local_device(place, cpu=False)
    assert "num_processes=2" in raised.value.fix
    assert local_device(place, cpu=True) == torch.device("cpu")


def test_rank_that_sees_one_gpu_has_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """``srun --gpus-per-task=1`` shows each task its own GPU. Torch's functions are replaced, as there is no GPU."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    place = environment.RankPlace(rank=3, world_size=4, local_rank=3, local_world_size=4)
    assert local_device(place, cpu=False) == torch.device("cuda", 0)
    assert chosen == [torch.device("cuda", 0)]


def wait_for_a_rank_that_comes_late(late_s: float) -> Any:
    timeout = datetime.timedelta(seconds=3)
    backend: Any = process_group.join(cpu=True, options=InitProcessGroupKwargs(timeout=timeout))
    backend.device = torch.device("meta")  # in place of a GPU: gloo can't send its tensors
    backend.barrier()
    deadline = torch_group._lengthen_gloo()
    if backend.place.rank == 1:
        time.sleep(late_s)  # rank 0 waits longer than the deadline of the group
    backend.barrier()
    backend.leave()
    return deadline


@pytest.mark.slow
def test_ranks_with_gpus_wait_for_each_other_by_gloo_and_for_long() -> None:
    with ranks.running(2) as both:
        half_an_hour = datetime.timedelta(seconds=1800)
        assert both.run(wait_for_a_rank_that_comes_late, 5.0) == [half_an_hour] * 2


def cpu_by_environment() -> str:
    with environment.patched({environment.USE_CPU: "true"}):
        return str(process_group.join().device)


def test_launcher_can_ask_for_the_cpu() -> None:
    assert cpu_by_environment() == "cpu"
    assert os.environ.get(environment.USE_CPU) is None
