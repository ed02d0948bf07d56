"""When a node counts as gone."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from notebook_accel.launching.elastic import nodes
from notebook_accel.launching.elastic.nodes import Card, GoneError, Guarded, NodeRound, NodeStatus

_SILENCE_S = 15.0
_RUNNING = NodeStatus(state="running", ranks=2)


@pytest.fixture
def pulse_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets node 0 look at a time in seconds since the round began. Node 1 reports nothing."""
    now = types.SimpleNamespace(s=1000.0)
    monkeypatch.setattr(nodes, "time", types.SimpleNamespace(monotonic=lambda: now.s))
    cards = {
        rank: Card(num_nodes=2, num_processes=2, max_restarts=0, python="", torch="", notebook_accel="", host="h")
        for rank in (0, 1)
    }
    at_once: Any = types.SimpleNamespace(call=lambda function, _: function())  # this store needs no thread
    present = NodeRound(Guarded(HashStore(), at_once, 20.0, "Node 0"), 0, cards, _SILENCE_S)

    def pulse(s: float) -> None:
        now.s = 1000.0 + s
        present.pulse(_RUNNING)

    return pulse


def test_node_is_gone_when_it_was_silent_for_long_enough(pulse_at: Callable[[float], None]) -> None:
    for s in range(16):
        pulse_at(s)
    with pytest.raises(GoneError, match=r"^Node 1 \(h\) has gone: nothing was heard of it for 15 s\.$"):
        pulse_at(16)


@pytest.mark.parametrize("before", [0, 3])
def test_time_in_which_this_node_does_not_look_is_no_silence(pulse_at: Callable[[float], None], before: int) -> None:
    """Such as before its ranks are started, or while its machine is paused."""
    for s in range(before):
        pulse_at(s)
    for s in range(before + 20, 36):
        pulse_at(s)
    with pytest.raises(GoneError):
        pulse_at(36)
