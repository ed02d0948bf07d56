"""Detached sessions whose kernel is killed at random moments."""

from __future__ import annotations

import random
import threading
import time

import pytest

from notebook_accel.launching import run_folders
from notebook_accel.launching.kernel import detached_runs
from notebook_accel.launching.kernel.detached_link import send_order
from notebook_accel.protocol import agent_messages as messages
from tests import processes
from tests.chaos import rounds
from tests.chaos.killed_kernels import is_decided
from tests.sessions import test_detached as sessions

_LONG_S = 100.0
_PREPARE = f"{sessions.BEGIN}\n{sessions.GROUP}\ncount = 0"
_CELLS = [
    "count += 1",
    "count += 1\naccelerator.wait_for_everyone()",
    "count += 1\ntime.sleep(0.3)",
    "count += 1\nfor _ in range(100): accelerator.gather(torch.ones(10))",
    "count += 1\nif rank == 1: raise ValueError('chaos')\naccelerator.wait_for_everyone()",
]
_MOMENTS_S = {"starting": 3.0, "idle": 0.0, "cells": 2.0}


@pytest.mark.chaos
@pytest.mark.usefixtures("state_home")
@pytest.mark.timeout(rounds.DURATION_S + 240)
def test_ranks_keep_what_they_have(capsys: pytest.CaptureFixture[str]) -> None:
    rounds.play("detached sessions", 0.15, [*_MOMENTS_S], _one_round, capsys, least=len(_MOMENTS_S))


def _one_round(moment: str, rng: random.Random, _: int) -> str:
    cells = rng.choices(_CELLS, k=200) if moment == "cells" else []
    with sessions.kernel(_PREPARE, *cells) as first:
        for line in ["ready"] if moment == "starting" else ["runs", "runs" if cells else "done"]:
            sessions.wait_for(first, line)
        time.sleep(rng.uniform(0.0, _MOMENTS_S[moment]))  # the random moment itself
        first.kill()
        first.wait()
    processes.wait_until(is_decided, "the launch was taken over or is gone", _LONG_S)
    said = "gone"
    if run_folders.every():
        said = _check(moment)
    run_folders.remove_old(all_ended=True)
    assert run_folders.every() == []
    return f"{moment}: {said}"


def _check(moment: str) -> str:
    has_attached = threading.Event()
    [folder] = run_folders.every()

    def interrupt_what_waits_in_vain() -> None:
        while not has_attached.wait(3.0):  # some ranks may have the last cell, and others not
            if detached_runs.summary(folder).session.startswith("busy"):
                send_order(folder, messages.Interrupt(job_id=folder.id))

    thread = threading.Thread(target=interrupt_what_waits_in_vain)
    thread.start()
    try:
        with sessions.attached() as session:
            has_attached.set()
            thread.join()
            if moment != "starting":
                counts = session.run(_count)
                assert max(counts) - min(counts) <= 1
                assert session.execute("kept == [rank * 10]")._bundles.keys() == {0, 1}
            session.execute(f"{sessions.BEGIN}\n{sessions.GROUP}")
            assert repr(session.execute(sessions.SUM)) == "ranks 0-1: 3"
            return "found" if moment == "starting" else f"found, after {max(counts)} cells"
    finally:
        has_attached.set()
        thread.join()


def _count() -> int:
    import __main__

    return int(__main__.count)
