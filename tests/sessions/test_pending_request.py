"""Tests of the request queue."""

from __future__ import annotations

import contextlib

import pytest

from notebook_accel.interrupts import Latch
from notebook_accel.sessions.kernel.pending_request import RequestQueue


def test_nothing_is_said_to_wait_for_itself_when_what_it_waits_for_ends_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    queue, first = RequestQueue(), contextlib.ExitStack()
    first.enter_context(queue.turn("the first"))
    is_set = Latch.is_set
    assert isinstance(is_set, property)

    def ends_once_asked(latch: Latch) -> bool:
        assert is_set.fget is not None
        answer = bool(is_set.fget(latch))
        first.close()
        return answer

    monkeypatch.setattr(Latch, "is_set", property(ends_once_asked))
    with queue.turn("the second"):
        assert queue.titles == ["the second"]
    said = capsys.readouterr().err
    assert said == "[the second waits until the first has ended; an interrupt ends only the waiting]\n"
