"""A session to which things happen at random moments: it either goes on or says what was lost."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from notebook_accel.errors import RankFailedError, RunError, SupervisorLostError
from notebook_accel.interrupts import held
from notebook_accel.launching.kernel import local
from notebook_accel.sessions.kernel.session import Session
from tests import processes
from tests.chaos import rounds

_SHARE = 0.25
_ENDS_S = 60.0  # far longer than any promise: what is looked for here is a hang
_PREPARE = """
import os, signal, time, torch
from notebook_accel import Accelerator
rank = int(os.environ["RANK"])
kept = rank
accelerator = Accelerator()
net = torch.nn.Linear(64, 64)
model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters()))
def train(steps, victim=-1, at=-1, happens=None):
    for step in range(steps):
        if (rank, step) == (victim, at):
            happens()
        accelerator.backward(model(torch.ones(8, 64) * (rank + 1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
def fail():
    raise ValueError("chaos")
"""
_TOGETHER = """
train(2)
weights = accelerator.gather(net.weight.detach().sum().reshape(1))
bool((weights == weights[0]).all()), kept == rank
"""
_LONG = 1_000_000

Trouble = Callable[[Session, random.Random], str]


class Sessions:
    """A session of two or three ranks, and a new one when it is over."""

    def __init__(self) -> None:
        self._session: Session | None = None

    def get(self, rng: random.Random) -> Session:
        if self._session is None or self._session.is_over:
            self.close()
            self._session = Session(num_processes=rng.choice([2, 2, 3]), use_cpu=True, view="none")
            self._session.execute(_PREPARE)
        return self._session

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def _with(session: Session, source: str, happens: Callable[[], object], moment_s: float) -> str:
    """Runs a cell during which something happens; how it ended."""
    timer = threading.Timer(moment_s, happens)
    try:
        timer.start()
        session.execute(source)
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    except RunError as error:
        return f"{type(error).__name__}: {error.what}"
    finally:
        timer.join()
    return "succeeded"


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _interrupted(session: Session, rng: random.Random) -> str:
    end = _with(session, f"train({_LONG})", _interrupt, rng.uniform(0.01, 0.6))
    assert end == "KeyboardInterrupt", end
    return end


def _interrupted_twice(session: Session, rng: random.Random) -> str:
    moment_s, gap_s = rng.uniform(0, 0.6), rng.choice([0.0, 0.0005, 0.002, 0.01])

    def interrupt_twice() -> None:
        processes.wait_until(lambda: session.job.doing() != "idle", "the cell runs")
        time.sleep(moment_s)
        for _ in range(2):
            _interrupt()
            time.sleep(gap_s)

    thread = threading.Thread(target=interrupt_twice)
    with pytest.raises(KeyboardInterrupt), held():  # until both have come: this code here couldn't bear them
        thread.start()
        try:
            session.execute(f"train({_LONG})")
        finally:
            thread.join()
    assert session._pool.alive == list(range(session.job.world_size))
    return f"KeyboardInterrupt, {1000 * gap_s:g} ms apart"


def _behind_one_in_the_background(session: Session, rng: random.Random) -> str:
    running = session.start(f"train({_LONG})")
    end = _with(session, "kept", _interrupt, rng.uniform(0.01, 0.4))
    assert end == "KeyboardInterrupt" and running.status == "running", (end, running.status)
    queued = session.start("kept")
    running.interrupt()
    assert queued.results(_ENDS_S) == list(range(session.job.world_size))
    assert running.wait(_ENDS_S) and running.status == "stopped"
    return "the one behind it didn't run, it was stopped, and the next one ran"


def _raises(session: Session, rng: random.Random) -> str:
    victim = rng.randrange(session.job.world_size)
    with pytest.raises(RankFailedError, match=f"rank {victim} of .*ValueError: chaos"):
        session.execute(f"train({_LONG}, {victim}, {rng.randrange(100)}, fail)")
    return f"rank {victim} raised"


def _rank(session: Session, rank: int) -> processes.Process:
    pid = session.job.ranks[rank].pid
    found = processes.read(pid) if pid is not None else None
    assert found is not None
    return found


def _signal(process: processes.Process) -> Callable[[], object]:
    return lambda: processes.kill(process)


def _killed(session: Session, rng: random.Random) -> str:
    victim = rng.randrange(session.job.world_size)
    end = _with(session, f"train({_LONG})", _signal(_rank(session, victim)), rng.uniform(0, 0.6))
    assert f"rank {victim} of {session.job.world_size} was killed by SIGKILL" in end, end
    assert session.restart() == [victim]
    session.execute("kept", ranks=[rank for rank in range(session.job.world_size) if rank != victim])
    session.execute(_PREPARE)
    return end


def _stopped(session: Session, rng: random.Random) -> str:
    rank = _rank(session, rng.randrange(session.job.world_size))

    def stop_and_interrupt() -> None:
        processes.kill(rank, signal.SIGSTOP)
        _interrupt()

    end = _with(session, f"train({_LONG})", stop_and_interrupt, rng.uniform(0, 0.6))
    assert end == "KeyboardInterrupt", end
    # An interrupt ends a cell only when all ranks have answered, for which it lets stopped ones go on. One that came
    # before the cell was sent has let nobody go on.
    processes.kill(rank, signal.SIGCONT)
    return end


def _agent_killed(session: Session, rng: random.Random) -> str:
    agent = next(process for process in processes.children(os.getpid()) if processes.is_agent(process))
    end = _with(session, f"train({_LONG})", _signal(agent), rng.uniform(0, 0.6))
    assert end.startswith(SupervisorLostError.__name__), end
    assert session.is_over
    return end


TROUBLES: dict[str, Trouble] = {
    "interrupt": _interrupted,
    "double interrupt": _interrupted_twice,
    "interrupt behind a cell in the background, and of that": _behind_one_in_the_background,
    "exception": _raises,
    "SIGKILL of a rank": _killed,
    "SIGSTOP of a rank, and an interrupt": _stopped,
    "SIGKILL of the agent": _agent_killed,
}


@pytest.fixture
def sessions() -> Iterator[Sessions]:
    made = Sessions()
    yield made
    made.close()
    local.engine().close()


@pytest.mark.chaos
@pytest.mark.timeout(rounds.DURATION_S + 240)
def test_whatever_happens_the_session_goes_on_or_says_what_is_lost(
    sessions: Sessions, capsys: pytest.CaptureFixture[str]
) -> None:
    def play(name: str, rng: random.Random, _: int) -> str:
        started_s = time.monotonic()
        session = sessions.get(rng)
        end = TROUBLES[name](session, rng)
        if not session.is_over:
            shown = session.execute(_TOGETHER)
            assert [shown[rank] for rank in range(session.job.world_size)] == ["(True, True)"] * session.job.world_size
        assert time.monotonic() - started_s < _ENDS_S
        return f"{name} of {session.job.world_size}: {end}"

    rounds.play("chaos in a session", _SHARE, sorted(TROUBLES), play, capsys)
