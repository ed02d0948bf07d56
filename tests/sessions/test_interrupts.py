"""Tests that interrupt the main thread at every bytecode of a session: nothing is left half done."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from notebook_accel import sessions
from notebook_accel.interrupts import held
from notebook_accel.launching.kernel import local
from notebook_accel.sessions.kernel.pending_request import RequestQueue
from notebook_accel.sessions.kernel.session import Session
from tests import processes
from tests.interrupting import Interrupting, every_step, kernel_handler  # noqa: F401 - a fixture
from tests.sessions.conftest import interrupted, runs

_OURS = (__file__, pathlib.Path(sessions.__file__).parent.joinpath("kernel").as_posix())
pytestmark = pytest.mark.usefixtures("kernel_handler")
_STRIDE = 83  # of the steps of a cell, which are thousands


def _until(path: pathlib.Path) -> str:
    return f"while not os.path.exists({str(path)!r}): time.sleep(0.01)"


class Plain:
    def __init__(self, number: int) -> None:
        self.number = number


@pytest.mark.parametrize("times", [1, 2])
def test_turn_is_left_wherever_an_interrupt_strikes(times: int) -> None:
    queue = RequestQueue()
    entered = 0
    for interrupting in every_step(times, *_OURS):

        def act() -> None:
            nonlocal entered
            with held() as interrupts, queue.turn("a cell", interrupts.check):
                entered += 1

        assert interrupting.call(act) == interrupting.has_come
        assert queue.titles == []
    assert entered > 10


def test_interrupt_ends_the_waiting_for_a_turn() -> None:
    queue = RequestQueue()
    said: list[str] = []
    waits, leaves = threading.Event(), threading.Event()

    def hold() -> None:
        with queue.turn("another cell"):
            waits.set()
            leaves.wait(60)

    def check() -> None:
        said.extend(queue.titles)
        signal.raise_signal(signal.SIGINT)
        interrupts.check()

    thread = threading.Thread(target=hold)
    thread.start()
    assert waits.wait(60)
    with (
        pytest.raises(KeyboardInterrupt),
        held() as interrupts,
        queue.turn("a cell", check, on_status=said.append),
    ):
        raise AssertionError("two at a time")
    assert said == ["waiting", "another cell", "a cell"] and queue.titles == ["another cell"]
    leaves.set()
    thread.join()
    assert queue.titles == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "act",
    [
        lambda session: session.execute("stays"),
        lambda session: session.pull("stays"),
        lambda session: session.push(sent=torch.ones(3)),
    ],
    ids=["cell", "pull", "push"],
)
def test_session_goes_on_wherever_an_interrupt_strikes(session: Session, act: Callable[[Session], object]) -> None:
    session.execute("stays = rank")
    step, interruptions, goes_on = 1, 0, True
    while goes_on:
        interrupting = Interrupting(step, 2, _OURS)
        was_interrupted = interrupting.call(functools.partial(act, session))
        goes_on = interrupting.has_come
        interruptions += was_interrupted
        assert was_interrupted or not goes_on
        assert session._pool._queue.titles == [] and session.job.doing() == "idle"
        assert not session._pool._connections._requests
        step += _STRIDE
    assert interruptions > 10
    assert repr(session.execute("stays")) == "rank 0: 0\nrank 1: 1"


@pytest.mark.slow
def test_closing_ends_every_rank_wherever_an_interrupt_strikes(engine: local.LocalEngine) -> None:
    step, interruptions, goes_on = 1, 0, True
    while goes_on:
        session = Session(num_processes=2, use_cpu=True, view="none")
        interrupting = Interrupting(step, 2, _OURS)
        interruptions += interrupting.call(session.close)
        goes_on = interrupting.has_come
        if not session.is_over:  # it struck before the closing began, which can be done again
            assert repr(session.execute("1")) == "ranks 0-1: 1"
            session.close()
        assert session.job.wait(60) and all(rank.ended is not None for rank in session.job.ranks)
        step += _STRIDE
    assert interruptions > 3


def test_double_click_ends_the_cell_and_kills_nobody(session: Session, tmp_path: pathlib.Path) -> None:
    def click_again() -> None:
        processes.wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "both ranks were interrupted")
        os.kill(os.getpid(), signal.SIGINT)
        (tmp_path / "clicked").touch()

    session.execute("import os, time\nhas_stayed = rank")
    with interrupted(session, runs, then=click_again):
        session.execute(
            f"try:\n    time.sleep(100)\nfinally:\n    open(f'{tmp_path}/{{rank}}', 'w').close()\n"
            f"    {_until(tmp_path / 'clicked')}\n    time.sleep(0.2)"
        )
    assert repr(session.execute("has_stayed")) == "rank 0: 0\nrank 1: 1"


@pytest.mark.slow
def test_handle_of_a_cell_in_the_background_bears_interrupts(session: Session) -> None:
    for step in range(1, 400, 29):
        cell = session.start("rank")
        with contextlib.suppress(KeyboardInterrupt):
            Interrupting(step, paths=_OURS).call(lambda cell=cell: cell.results(60))  # type: ignore[misc]
        assert cell.wait(60) and cell.results(0) == [0, 1]


def test_what_a_rank_could_not_take_since_it_was_interrupted_is_sent_again(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "of_the_notebook", Plain(3), raising=False)
    pids = [info.pid for info in session.job.ranks]
    for pid in pids:
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    cell = session.start("of_the_notebook.number")
    cell.interrupt()  # lets them go on, and reaches them before the delivery
    assert cell.wait(60) and cell.status == "stopped"
    assert repr(session.execute("of_the_notebook.number")) == "ranks 0-1: 3"
    session.execute("of_the_notebook = 4")
    assert repr(session.execute("of_the_notebook")) == "ranks 0-1: 4"


@pytest.mark.slow
def test_interrupt_that_reaches_a_rank_late_is_not_for_the_next_cell(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    connections = session._pool._connections
    send, put = connections.signal, connections._put
    late: list[tuple[int, signal.Signals]] = []

    def signal_late(rank: int, number: signal.Signals) -> None:
        late.append((rank, number))  # the system is busy, and the cell comes to its end
        (tmp_path / "signalled").touch()

    def put_after(thing: Any) -> None:
        while late:
            send(*late.pop())
        put(thing)

    session.execute("import os, time")
    with monkeypatch.context() as busy:
        busy.setattr(connections, "signal", signal_late)
        busy.setattr(connections, "_put", put_after)
        with interrupted(session, runs):
            session.execute(_until(tmp_path / "signalled"))
        assert repr(session.execute("time.sleep(0.5)\nrank")) == "rank 0: 0\nrank 1: 1"
    assert not late
