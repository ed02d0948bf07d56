"""Tests of a session's jobs in the background: their states, and who gets their errors."""

from __future__ import annotations

import pathlib
import sys
import threading
import types
from typing import Any

import pytest

from notebook_accel.errors import PayloadError, RunStoppedError, RunTimeoutError
from notebook_accel.launching.state.stacks import Stacks
from notebook_accel.protocol import session_messages as messages
from notebook_accel.sessions.kernel import session_job
from notebook_accel.sessions.kernel.output import CellOutput
from notebook_accel.sessions.kernel.session import Session
from notebook_accel.sessions.kernel.session_job import SessionJob


def test_at_every_moment_a_cell_has_ended_in_all_ways_or_in_none(capsys: pytest.CaptureFixture[str]) -> None:
    answers = {0: (messages.Reply(number=1), 1)}
    cell = SessionJob("the cell", lambda **_: answers, lambda _: Stacks([]))
    seen = []

    def look(frame: types.FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename == session_job.__file__:
            sys.settrace(None)
            seen.append((cell.status, cell.done))
            sys.settrace(look)
        return look

    threading.settrace(look)
    try:
        cell.start()
        assert cell.wait(60)
    finally:
        threading.settrace(None)  # type: ignore[arg-type]  # which typeshed forgets
    assert set(seen) <= {("waiting", False), ("succeeded", True)} and ("waiting", False) in seen
    assert (cell.status, cell.results(0)) == ("succeeded", [1])
    assert "[the cell has ended" in capsys.readouterr().out


def test_cell_is_stopped_as_a_job_is(session: Session) -> None:
    cell = session.start("time.sleep(100)")
    with pytest.raises(RunTimeoutError, match="has not ended after 0 s"):
        cell.results(0)
    assert (cell.status, cell.done, cell.error) == ("running", False, None)
    cell.stop()
    with pytest.raises(RunStoppedError, match="was interrupted") as raised:
        cell.results(60)
    assert (cell.status, cell.done, cell.error) == ("stopped", True, raised.value)
    assert repr(session.execute("rank")) == "rank 0: 0\nrank 1: 1"


def test_interrupts_that_come_when_the_ranks_have_answered_are_not_for_what_follows(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = CellOutput.finish

    def interrupted_twice(*args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert has_started.wait(30)
            for _ in range(2):
                cell.interrupt()
            quiet = session._pool._ask(messages.LookUp, [0, 1], text="rank", describes=False)
            answered.append(sorted(quiet))
        return finish(*args)

    answered: list[list[int]] = []
    monkeypatch.setattr(CellOutput, "finish", interrupted_twice)
    has_started = threading.Event()
    cell = session.start("rank")
    has_started.set()
    assert cell.results(60) == [0, 1] and answered == [[0, 1]]
    assert repr(session.execute("rank")) == "rank 0: 0\nrank 1: 1"


def test_what_can_not_be_sent_is_said_by_whoever_is_there_to_say_it(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "lock_of_the_notebook", threading.Lock(), raising=False)
    with pytest.raises(PayloadError, match="it is a lock"):
        session.start("lock_of_the_notebook")
    assert capsys.readouterr().err == ""  # the cell that starts it shows the error
    goes_on = str(tmp_path / "goes on")
    first = session.start(f"while not os.path.exists({goes_on!r}): time.sleep(0.01)")
    queued = session.start("lock_of_the_notebook")  # which cell was to show the error has ended
    assert (first.status, queued.status) == ("running", "waiting")
    pathlib.Path(goes_on).touch()
    assert queued.wait(60) and queued.status == "failed"
    said = capsys.readouterr().err
    assert "in the background, after" in said and "it is a lock" in said
    with pytest.raises(PayloadError, match="it is a lock"):
        queued.results(0)
