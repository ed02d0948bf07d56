"""The ranks' answers to a request for a profile, side by side."""

from __future__ import annotations

import json
import pathlib

import pytest

from notebook_accel.errors import ConfigError
from notebook_accel.launching.state import profiles
from notebook_accel.launching.state.profiles import Profile, ProfileRequest, RankProfile
from notebook_accel.launching.state.rank import RankState
from notebook_accel.protocol import events
from notebook_accel.protocol.events import OperatorTime, SampledLine, Span


def spans(forward_us: float, backward_us: float) -> list[Span]:
    return [
        Span("step", "ProfilerStep#1", 0.0, forward_us + backward_us),
        Span("phase", "forward", 0.0, forward_us),
        Span("phase", "backward", forward_us, backward_us),
    ]


def made(ranks: int = 2) -> Profile:
    line = SampledLine("forward", "", "In[7], line 2", "x = model(x)", 30)
    elsewhere = SampledLine("data", "", "", "", 10)
    operators = (OperatorTime("aten::mm", 4, 8000.0), OperatorTime("aten::add", 2, 100.0))
    return Profile(
        "train",
        1,
        tuple(
            RankProfile(rank, 1, 0.0, tuple(spans(16_000, 48_000)), operators, (line, elsewhere))
            for rank in range(ranks)
        ),
    )


def answer(request: ProfileRequest, time_s: float = 0.0, **fields: object) -> events.Profiled:
    return events.Profiled(time_s=time_s, number=request.number, **fields)  # type: ignore[arg-type]


def test_text_shows_each_ranks_phases_and_what_takes_most() -> None:
    shown = str(made()).splitlines()
    assert shown[0] == "1 step of 'train' on 2 ranks, 64.0 ms each"
    assert shown[1] == "rank 0  " + 16 * "f" + 48 * "b"
    assert shown[2] == "rank 1  " + 16 * "f" + 48 * "b"
    assert "8.0 ms       4      aten::mm" in shown
    assert "75%    In[7], line 2  x = model(x)" in shown


def test_of_many_ranks_text_shows_some() -> None:
    shown = str(made(64))
    assert shown.count(16 * "f" + 48 * "b") == 16
    assert "… and 48 more ranks" in shown


def test_snapshots_of_memory_are_named(tmp_path: pathlib.Path) -> None:
    request = ProfileRequest(1, 10.0, [RankState(0), RankState(1)], memory=True)
    for rank in range(2):
        (tmp_path / f"{rank}.pickle").touch()
        request.take(rank, answer(request, steps=1, file=str(tmp_path / f"{rank}.pickle")))
    found = request.profile("train")
    assert [(rank.trace, rank.snapshot) for rank in found.ranks] == [
        (None, tmp_path / f"{rank}.pickle") for rank in range(2)
    ]
    assert str(found).splitlines()[-1] == (
        f"memory snapshots for https://pytorch.org/memory_viz: {tmp_path}/0.pickle and 1 more beside it"
    )


def test_data_are_json() -> None:
    data = json.loads(json.dumps(made().to_dict()))
    assert data["ranks"][1]["spans"][1] == ["phase", "forward", 0.0, 16_000.0]


def test_steps_of_a_profile_have_a_limit() -> None:
    for steps in (0, 101, -1):
        with pytest.raises(ConfigError, match="from 1 to 100"):
            profiles.check_steps(steps)


def test_answers_are_put_on_one_clock() -> None:
    request = ProfileRequest(1, 10.0, [RankState(0), RankState(1)])
    request.take(0, answer(request, 100.0, steps=1, age_s=2.0, spans=spans(1, 1)))
    request.take(1, answer(request, 100.5, steps=1, age_s=2.4, spans=spans(1, 1)))
    first, second = request.profile("train").ranks
    assert (first.begin_us, second.begin_us) == pytest.approx((0.0, 100_000.0))


def test_clock_of_another_node_is_set_by_the_steps() -> None:
    request = ProfileRequest(1, 10.0, [RankState(0), RankState(1, node=1), RankState(2, node=1)])
    for rank, begin_s in ((0, 100.0), (1, 7000.0), (2, 7000.2)):
        request.take(rank, answer(request, begin_s, steps=1, spans=spans(1, 1)))
    begins = [rank.begin_us for rank in request.profile("train").ranks]
    assert begins == pytest.approx([100_000.0, 0.0, 200_000.0])


def test_wait_ends_when_nobody_can_answer_any_more(tmp_path: pathlib.Path) -> None:
    request = ProfileRequest(2, 10.0, [RankState(rank) for rank in range(4)])
    request.take(0, answer(request, why="it did 0 of 2 steps in 10 s"))
    request.take(1, events.Ended(exit_code=1))
    request.take(2, events.Profiled(number="an earlier one", steps=2))
    request.take(2, answer(request, steps=2, file=str(tmp_path / "gone.json"), spans=spans(1, 1)))
    assert not request._is_answered.is_set
    request.take(3, answer(request, why="it did 0 of 2 steps in 10 s"))
    assert request._is_answered.is_set
    found = request.profile("train")
    assert found.title == "2 steps of 'train' on 1 of 4 ranks"
    assert found.notes == ["ranks 0, 3: it did 0 of 2 steps in 10 s", "rank 1: it ended meanwhile"]
    assert found.ranks[2].trace is None


def test_restart_of_all_ranks_ends_the_wait() -> None:
    request = ProfileRequest(2, 10.0, [RankState(0)])
    request.take(0, events.Restarting(number=1, of=3, why="rank 0 failed"))
    assert request._is_answered.is_set
    assert request.profile("train").notes == ["rank 0: it has not answered"]
