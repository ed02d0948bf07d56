"""Tests that interrupt the main thread at every bytecode of a session: nothing is left half done."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from notebook_accel.sessions.kernel import interrupts as interrupts_module
from notebook_accel.sessions.kernel.interrupts import Interrupts, held
from notebook_accel.sessions.kernel.pending_request import RequestQueue
from notebook_accel.sessions.kernel.session import Session
from tests import processes
from tests.sessions.conftest import interrupted, runs

_OURS = interrupts_module.__file__.rpartition("/")[0]
_STRIDE = 83  # of the steps of a cell, which are thousands


def _until(path: pathlib.Path) -> str:
    return f"while not os.path.exists({str(path)!r}): time.sleep(0.01)"


class Plain:
    def __init__(self, number: int) -> None:
        self.number = number


class Interrupting:
    """Raises SIGINT at the n-th bytecode that this thread runs in some files, and perhaps at the next ones.

    Args:
        step: The number of the bytecode.
        times: The number of signals. A trace that has raised ends, so later ones come only if the first raised nothing.
        folder: Folder of the files.
    """

    def __init__(self, step: int, times: int = 1, folder: str = _OURS) -> None:
        self._left = step
        self._times = times
        self._folder = folder
        self.has_come = False

    def _trace(self, frame: types.FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith((self._folder, __file__)) or frame.f_code.co_name == "_arrive":
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if -self._times < self._left <= 0:
                self.has_come = True
                signal.raise_signal(signal.SIGINT)
        return self._trace

    def call(self, act: Callable[[], object]) -> bool:
        """Call ``act``, and return whether it has ended by a KeyboardInterrupt."""
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks whether any frame wants it only when a trace is set
        sys.settrace(self._trace)
        try:
            act()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False


def every_step(times: int) -> Iterator[Interrupting]:
    """Yield an ``Interrupting`` for each step, until an act ends before its step."""
    step = 0
    goes_on = True
    while goes_on:
        step += 1
        made = Interrupting(step, times)
        yield made
        goes_on = made.has_come


@pytest.fixture(autouse=True)
def handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the handler that a kernel has while a cell runs. It must be there in the end."""
    monkeypatch.setattr(interrupts_module, "_SAME_CLICK_S", 60.0)  # however slow the machine is
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.parametrize("times", [1, 2])
def test_what_has_begun_is_ended_wherever_an_interrupt_strikes(times: int) -> None:
    ends = set()
    for interrupting in every_step(times):
        done: list[str] = []

        def act(done: list[str] = done) -> None:
            with held():
                done.append("taken")
                try:
                    done.append("used")
                finally:
                    done.append("given back")

        was_interrupted = interrupting.call(act)
        assert was_interrupted == interrupting.has_come
        assert done in ([], ["taken", "used", "given back"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ends.add((was_interrupted, bool(done)))
    assert ends == {(True, False), (True, True), (False, True)}


@pytest.mark.parametrize("times", [1, 2])
def test_turn_is_left_wherever_an_interrupt_strikes(times: int) -> None:
    queue = RequestQueue()
    entered = 0
    for interrupting in every_step(times):

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


def test_code_of_the_users_is_ended_and_what_ends_it_is_not() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), held() as interrupts:
        try:
            with interrupts.allowed():
                done.append("began")
                signal.raise_signal(signal.SIGINT)
                done.append("went on")
        finally:
            signal.raise_signal(signal.SIGINT)
            done.append("tidied up")
    assert done == ["began", "tidied up"]


def test_one_that_has_come_is_raised_in_the_end_and_two_clicks_are_one() -> None:
    woken: list[bool] = []
    with pytest.raises(KeyboardInterrupt) as raised, held() as interrupts:
        with interrupts.waking(lambda: woken.append(True)), held() as same:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert same is interrupts and woken == [True]
            taken = interrupts.take()
            assert taken is not None and not interrupts.has_pending and interrupts.take() is None
        interrupts.add(EOFError())
    assert taken is raised.value and woken == [True]
    with pytest.raises(EOFError), held():
        signal.raise_signal(signal.SIGINT)
        raise EOFError


def test_handler_of_the_users_does_what_it_did() -> None:
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        with held() as interrupts:
            signal.raise_signal(signal.SIGINT)
            assert not interrupts.has_pending
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert heard == [signal.SIGINT]


def test_other_threads_hold_nothing_back() -> None:
    handlers: list[object] = []

    def act() -> None:
        with held():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


@pytest.mark.slow
def test_session_goes_on_wherever_an_interrupt_strikes_a_cell(session: Session) -> None:
    session.execute("stays = rank")
    step, interruptions, goes_on = 1, 0, True
    while goes_on:
        interrupting = Interrupting(step, times=2)
        was_interrupted = interrupting.call(lambda: session.execute("stays"))
        goes_on = interrupting.has_come
        interruptions += was_interrupted
        assert was_interrupted or not goes_on
        assert session._pool._queue.titles == [] and session.job.doing() == "idle"
        assert not session._pool._connections._requests
        step += _STRIDE
    assert interruptions > 10
    assert repr(session.execute("stays")) == "rank 0: 0\nrank 1: 1"


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
            Interrupting(step).call(lambda cell=cell: cell.results(60))  # type: ignore[misc]
        assert cell.wait(60) and cell.results(0) == [0, 1]


def test_another_thread_holds_what_is_noted_for_it() -> None:
    noted = Interrupts()
    seen: list[bool] = []

    def act() -> None:
        with held(noted), held() as same:
            seen.append(same is noted)
            noted.add(KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                same.check()
        with held() as other:
            seen.append(other is noted)

    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    assert seen == [True, False]


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
