"""Ranks meet, whatever address their program names, and one that would wait for ever is told why."""

from __future__ import annotations

import pathlib
import socket
from collections.abc import Callable, Iterator

import pytest

from notebook_accel.errors import RankFailedError
from notebook_accel.launching.kernel.job import Job
from tests.launching import functions
from tests.training.ranks import free_port


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which another program listens, which answers nobody."""
    with socket.create_server(("", 0)) as server:
        yield int(server.getsockname()[1])


@pytest.mark.parametrize(
    "how",
    [
        "variables",
        "tcp",
        *(pytest.param(how, marks=pytest.mark.slow) for how in ("port", "random port", "env", "nowhere", "file")),
    ],
)
def test_ranks_meet_at_any_address_one_group_after_another(
    launch: Callable[..., Job], taken: int, tmp_path: pathlib.Path, how: str
) -> None:
    assert launch(functions.meets, how, taken, str(tmp_path)).results(timeout_s=60) == [[3.0, 3.0]] * 2


@pytest.mark.slow
def test_some_of_the_ranks_make_groups_that_differ_by_their_addresses(
    launch: Callable[..., Job], tmp_path: pathlib.Path
) -> None:
    job = launch(functions.meets, "halves", 0, str(tmp_path), num_processes=4)
    assert job.results(timeout_s=60) == [[3.0, 3.0]] * 4


@pytest.mark.parametrize(
    ("method", "names_address"), [("fork", False), pytest.param("spawn", True, marks=pytest.mark.slow)]
)
def test_processes_that_a_rank_starts_make_a_group_of_their_own(
    launch: Callable[..., Job], method: str, names_address: bool
) -> None:
    port = free_port() if names_address else 0
    assert launch(functions.starts_processes, method, port).results(timeout_s=60) == [0, 1]


def test_second_rendezvous_is_torchs_own(launch: Callable[..., Job]) -> None:
    results = launch(functions.serves_another_group, free_port()).results(timeout_s=60)
    assert list(results) == [[True, 1.0, 3.0], [True, 0.0, 3.0]]


@pytest.mark.parametrize(("member", "world_size", "who"), [(0, 4, "Rank [01]"), (0, 2, "Rank 1"), (0, 0, "Rank [01]")])
def test_rank_that_would_wait_for_ever_is_told_what_to_type(
    launch: Callable[..., Job], member: int, world_size: int, who: str
) -> None:
    with pytest.raises(RankFailedError, match=f"{who} of 2 joins a process group as rank 0 of {world_size}.") as caught:
        launch(functions.joins_as, member, world_size).results(timeout_s=60)
    assert "init_process_group(backend) without rank and world_size" in str(caught.value)
