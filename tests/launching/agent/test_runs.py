"""Who is told to end, and when, as soon as a rank has failed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from notebook_accel.launching.agent.runs import Rank, Run, open_rank
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from tests import processes

LAUNCH = messages.Launch(job_id="1", world_size=2, port=0, grace_s=60.0, timeout_s=None, log_folder="")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process in the place of a rank, which ends at SIGTERM, or when its standard input does."""
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        yield process
        process.kill()


@pytest.fixture
def run(child: subprocess.Popen[bytes]) -> Iterator[Run]:
    """A run of two ranks, of which the second is the child."""
    made = Run(LAUNCH, [])
    for number in range(2):
        rank, theirs, _ = open_rank(LAUNCH, number, lambda _: None)
        theirs.close()
        made.put(rank)
    made.ranks[1].forked(child.pid)
    yield made
    for rank in made.ranks:
        rank.close()


def lose_peer(run: Run) -> Rank:
    rank = run.ranks[0]
    rank.failure = events.Failed(kind="RuntimeError", message="", traceback="", lost_peer=True)
    run.rank_failed(rank)
    rank.status = 1
    run.rank_failed(rank)  # once more, when it has ended
    return rank


def test_rank_that_lost_its_peer_lets_the_peer_say_why(run: Run, child: subprocess.Popen[bytes]) -> None:
    lose_peer(run)
    run.tick(time.monotonic())
    assert run.reason == "" and not run.ranks[1].was_told_to_end
    run.ranks[1].failure = events.Failed(kind="ValueError", message="", traceback="")
    run.rank_failed(run.ranks[1])
    assert run.reason == "failed"


def test_peer_that_says_nothing_is_stopped_after_a_moment(run: Run, child: subprocess.Popen[bytes]) -> None:
    lose_peer(run)
    run.tick(time.monotonic() + 5)
    assert run.reason == "failed" and run.ranks[1].was_told_to_end
    assert child.wait(20) == -signal.SIGTERM


def test_any_other_failure_stops_the_others_at_once(run: Run, child: subprocess.Popen[bytes]) -> None:
    run.rank_failed(run.ranks[0])
    assert run.reason == "failed" and child.wait(20) == -signal.SIGTERM


def test_rank_that_has_ended_by_itself_was_not_stopped(run: Run, child: subprocess.Popen[bytes]) -> None:
    os.kill(child.pid, signal.SIGSEGV)
    processes.wait_until(lambda: (now := processes.read(child.pid)) and now.state == "Z", "it is gone, and not reaped")
    run.rank_failed(run.ranks[0])
    assert run.reason == "failed" and not run.ranks[1].was_told_to_end
