"""One error of the system ends the one run, template or log that it meets, wherever the agent meets it.

The agent here is a real one that has system calls fail on demand: see ``faults/sitecustomize.py``. Each way in which a
run goes is gone once to find the calls that the agent makes for it, and then once for each of them, which fails.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from notebook_accel.config import LaunchConfig
from notebook_accel.launching.kernel import launcher, local
from notebook_accel.launching.kernel.job import Job
from tests import processes
from tests.launches import pids_of
from tests.launching import functions

# They are no run's: the kernel's line, without which there is nobody to run anything for, and this test's own signal.
_OF_NO_RUN = {"Kernel._read: recvmsg", "Agent._read_signals: read"}


class Faults:
    """An agent whose calls fail on demand, and a run that nothing is to happen to.

    Attributes:
        folder: Where the agent takes its orders from.
        orders: How many it has had.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._known = set(_OF_NO_RUN)
        self.orders = 0
        self.other = self.launch(functions.waits, num_processes=1)
        self._pids = pids_of(self.other)
        [agent] = [child for child in processes.children(os.getpid()) if processes.is_agent(child)]
        self._agent = agent

    def launch(self, function: Callable[..., Any], *args: Any, **options: Any) -> Job:
        config = LaunchConfig(num_processes=2, use_cpu=True, view="none", grace_s=1.0).replace(**options)
        return launcher.launch_function(function, args, {}, config, is_background=False)

    def order(self, **order: str) -> None:
        self.orders += 1
        told = {"number": str(self.orders), "spared": self.other.id, **order}
        (self.folder / "order").write_text(json.dumps(told))
        os.kill(self._agent.pid, signal.SIGUSR1)
        taken = self.folder / "taken"
        processes.wait_until(lambda: taken.exists() and taken.read_text() == told["number"], "the agent has its order")

    def new_places(self, go: Callable[[Faults], object]) -> list[str]:
        """The calls that the agent makes when a run goes so, as far as it made none of them before."""
        self.order()
        go(self)
        self.order(note="places")
        found = set(json.loads((self.folder / "places").read_text())) - self._known
        self._known |= found
        return sorted(found)

    def check(self, place: str) -> None:
        """The agent and the other run are what they were."""
        [agent] = [child for child in processes.children(os.getpid()) if processes.is_agent(child)]
        assert agent == self._agent, place
        assert self.other.status == "running", (place, self.other.error)
        assert all(processes.read(pid) is not None for pid in self._pids.values()), place


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    folder = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAULTS", str(folder))
        patch.setenv("PYTHONPATH", str(pathlib.Path(__file__).with_name("faults")), prepend=os.pathsep)
        local.engine().close()  # of an earlier module: this one's is to find it
        made = Faults(folder)
        yield made
        local.engine().close()


def ends(job: Job) -> str:
    """Return how the run has ended."""
    assert job.wait(30), job
    status = job.status
    job.discard()
    return status


def prints_much() -> None:
    for number in range(200):
        print("line", number, flush=True)


def runs(faults: Faults) -> None:
    ends(faults.launch(prints_much))


def is_asked_and_stopped(faults: Faults) -> None:
    job = faults.launch(functions.waits)
    processes.wait_until(lambda: job.status == "running" or job.done, "it runs")
    if not job.done:
        job.stacks()
    job.interrupt(escalate=False)
    job.stop()
    ends(job)


def is_killed(faults: Faults) -> None:
    job = faults.launch(functions.waits)
    processes.wait_until(lambda: job.status == "running" or job.done, "it runs")
    job.kill()
    ends(job)


def restarts(faults: Faults) -> None:
    ends(faults.launch(functions.fails_the_first_time, max_restarts=1))


def has_a_new_template(faults: Faults) -> None:
    """One that can't import torch, and says so at once."""
    with pytest.MonkeyPatch.context() as patch:
        stub = faults.folder / "stub"
        stub.mkdir(exist_ok=True)
        (stub / "torch.py").write_text("raise SystemExit('no torch here')")
        patch.syspath_prepend(stub)
        patch.setenv("TORCH_OF_THIS_TEST", str(faults.orders))
        ends(faults.launch(functions.rank))


@pytest.mark.chaos
@pytest.mark.timeout(600)  # some forty launches
def test_error_ends_the_run_that_met_it_and_no_other(faults: Faults) -> None:
    places: list[str] = []
    fired = []
    for go in (runs, is_asked_and_stopped, is_killed, restarts, has_a_new_template):
        if go is not has_a_new_template:
            assert ends(faults.launch(functions.rank)) == "succeeded"  # its template is there
        new = faults.new_places(go)  # those that none before it had, which depends on timing
        places += new
        for place in new:
            (faults.folder / "fired").unlink(missing_ok=True)
            faults.order(fail=place)
            try:
                go(faults)
            except AssertionError as error:
                raise AssertionError(f"when {place} failed in {go.__name__}: {error}") from None
            if (faults.folder / "fired").exists():
                fired.append(place)
            faults.check(place)
    assert len(places) >= 24 and len(fired) >= len(places) / 2, f"only {fired} of {places} could be had fail"
