"""A run carries out the orders of its policy on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from notebook_accel.launching.agent.runs import Run, open_rank
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


def test_rank_that_lost_its_peer_lets_the_peer_say_why(run: Run, child: subprocess.Popen[bytes]) -> None:
    run.ranks[0].failure = events.Failed(kind="RuntimeError", message="", traceback="", lost_peer=True)
    run.tick(time.monotonic())
    assert run.policy.reason == "" and not run.ranks[1].was_told_to_end
    run.tick(time.monotonic() + 5)
    assert run.policy.reason == "failed" and run.ranks[1].was_told_to_end
    assert child.wait(20) == -signal.SIGTERM


def test_rank_that_has_ended_by_itself_was_not_stopped(run: Run, child: subprocess.Popen[bytes]) -> None:
    os.kill(child.pid, signal.SIGSEGV)
    processes.wait_until(lambda: (now := processes.read(child.pid)) and now.state == "Z", "it is gone, and not reaped")
    run.ranks[0].status = 1
    run.tick(time.monotonic())
    assert run.policy.reason == "failed" and not run.ranks[1].was_told_to_end


def test_rank_that_is_interrupted_before_it_has_a_process_is_terminated(
    run: Run, child: subprocess.Popen[bytes]
) -> None:
    run.ranks[1].pid = None
    run.end("interrupt", "interrupted")
    run.ranks[1].forked(child.pid)  # too young to handle an interrupt
    assert child.wait(20) == -signal.SIGTERM
