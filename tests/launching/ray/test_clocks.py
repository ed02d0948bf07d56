"""Nodes whose clocks began at another time than the kernel's, as those of two machines do."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from notebook_accel.errors import RankFailedError, RunStoppedError
from notebook_accel.launching.state.stacks import Silence
from notebook_accel.protocol import events
from tests import processes
from tests.launching.ray import clusters, work
from tests.launching.ray.runs import DEADLINE_S, connected, launch

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not clusters.clocks_can_differ(), reason="NOT TESTED: time namespaces are for root"),
]

_DAY_S = 86_400


@pytest.fixture(scope="module")
def options(cluster: Any) -> Iterator[dict[str, Any]]:
    """For one rank on a node with the kernel's clock and one on a node whose clock is a day ahead."""
    nodes = [
        clusters.add_node(cluster, num_cpus=0, resources={"apart": 1}, clock_ahead_s=ahead_s) for ahead_s in (0, _DAY_S)
    ]
    has = connected().cluster_resources
    processes.wait_until(lambda: has().get("apart") == 2, "the nodes are there", timeout_s=60)
    yield {"strategy": "STRICT_SPREAD", "cpus_per_rank": 0, "resources": {"apart": 1}}
    for node in nodes:
        cluster.remove_node(node)


@pytest.mark.parametrize("is_ahead_first", [True, False])
def test_first_failure_is_named_whatever_the_clocks_show(
    options: dict[str, Any], tmp_path: pathlib.Path, is_ahead_first: bool
) -> None:
    began_s = time.monotonic()
    job = launch(work.fails_in_turn, str(tmp_path), began_s, is_ahead_first, engine_options=options, grace_s=30.0)
    with pytest.raises(RankFailedError) as caught:
        job.results(DEADLINE_S)
    assert caught.value.what.endswith("ValueError: first")
    assert [end.error for end in caught.value.others] == ["ValueError: second"]
    times = sorted(rank.failed.time_s for rank in job.ranks if rank.failed is not None)
    assert began_s < times[0] < times[1] < time.monotonic()
    assert times[1] - times[0] == pytest.approx(0.5, abs=0.4)


def test_silence_is_told_from_work_whatever_the_clocks_show(options: dict[str, Any]) -> None:
    job = launch(work.stands_still, time.monotonic(), engine_options=options)
    job._silence = Silence(shortest_s=2.0)

    def said() -> list[events.Silent] | None:
        job.notice_silence(time.monotonic())
        silent = [info.silent for info in job.ranks if info.silent is not None]
        return silent if len(silent) == 2 else None

    silent = processes.wait_until(said, "both ranks are silent, and the reason is known", timeout_s=60)
    assert all(1 < event.time_s - event.since_s < 60 for event in silent)
    assert sorted(event.waits_in for event in silent) == ["", "barrier"]
    job.stop()
    with pytest.raises(RunStoppedError):
        job.results(DEADLINE_S)
