"""Two runs side by side: the sentence that says why more ranks aren't faster."""

from __future__ import annotations

import json

import pytest

from notebook_accel import compare
from notebook_accel.errors import RunError
from notebook_accel.launching.state.comparison import Comparison, Side
from notebook_accel.launching.state.diagnosis import Diagnosis, Verdict


def side(name: str, world_size: int, rows: float = 32, verdicts: tuple[Verdict, ...] = (), **ms: float) -> Side:
    """A run whose ranks all have steps of these phases."""
    phases = {phase: took / 1000 for phase, took in ms.items()}
    steps = dict.fromkeys(range(world_size), phases)
    return Side(name, Diagnosis(verdicts, steps, world_size=world_size, rows=rows))


ONE = side("one", 1, forward=10, backward=10)


def test_ranks_that_lose_nothing_need_no_reason() -> None:
    found = Comparison(ONE, side("two", 2, forward=10, backward=10, communication=1))
    assert found.sentence == "2 ranks do 1.90 times the work of 1 rank in the same time; 2.00 is the most."


@pytest.mark.parametrize(
    ("second", "cause", "said"),
    [
        (side("two", 2, forward=10, backward=10, communication=40), "exchanging gradients", "40 ms of a step of 60 ms"),
        (side("two", 2, forward=30, backward=22), "computing", "share the cores"),
        (side("two", 2, forward=10, backward=10, data=30), "waiting for data", "num_workers"),
        (side("two", 2, forward=10, backward=10, other=30), "code around the training", "where 'one' needs 0.0 ms"),
        # Half the batch takes a rank as long as the whole one.
        (
            side("two", 2, rows=16, forward=10, backward=10, communication=1),
            "computing",
            "needs 10 ms for as many rows",
        ),
    ],
)
def test_reason_is_what_the_ranks_need_on_top(second: Side, cause: str, said: str) -> None:
    for found in (Comparison(ONE, second), Comparison(second, ONE)):
        assert found.cause == cause
        assert f"Most of the difference is {cause}: " in found.sentence
        assert said in found.sentence


def test_slower_than_one_is_a_number_below_one() -> None:
    found = Comparison(ONE, side("two", 2, forward=10, backward=10, communication=40))
    assert found.sentence.startswith("2 ranks do 0.67 times the work of 1 rank in the same time; 2.00 is the most. ")
    assert "gradient_accumulation_steps" in found.sentence


def test_rank_that_is_late_is_named_by_the_verdict() -> None:
    verdict = Verdict("straggler", 0.5, "Rank 1 computes 3.0 times as long as the others.", "", (1,))
    found = Comparison(ONE, side("two", 2, verdicts=(verdict,), forward=30, backward=30, waiting=30))
    assert found.cause == "waiting for a rank that is late"
    assert "Rank 1 computes 3.0 times as long as the others." in found.sentence


def test_two_runs_of_as_many_ranks() -> None:
    slow = side("slow", 1, forward=10, backward=10, data=10)
    assert Comparison(slow, ONE).sentence.startswith(
        "'one' is 1.50 times as fast as 'slow'. Most of the difference is "
    )
    assert Comparison(slow, ONE).cause == "waiting for data"
    computes_longer = Comparison(side("slow", 1, forward=30, backward=10), ONE)
    assert computes_longer.cause == "computing"
    assert computes_longer.sentence.endswith("where 'one' needs 20 ms for as many rows.")  # no advice for more ranks
    assert Comparison(ONE, ONE).sentence == "'one' and 'one' are about as fast."


def test_without_rows_steps_are_compared() -> None:
    found = Comparison(side("one", 1, rows=0, forward=20), side("two", 2, forward=20, communication=40))
    assert "steps a second" in str(found)
    assert found.per_s(found.second) == pytest.approx(2 / 0.06)


def test_text_and_data_have_both_sides() -> None:
    found = Comparison(ONE, side("two", 2, forward=10, backward=10, communication=40))
    lines = str(found).splitlines()
    assert lines[1:4] == [
        "                 one      two",
        "ranks            1        2",
        "rows a second    1,600.0  1,066.7",
    ]
    assert "  communication  0.0 ms   40 ms" in lines
    data = json.loads(json.dumps(found.to_dict()))
    assert data["second"]["rows_per_s"] == pytest.approx(1066.7, abs=0.1)
    assert data["second"]["phases"]["communication"] == pytest.approx(0.04)


def test_run_without_steps_is_an_error() -> None:
    class Unmeasured:
        name = "train"

        def diagnosis(self) -> Diagnosis:
            return Diagnosis()

    with pytest.raises(RunError, match="Too few steps of 'train'"):
        compare(Unmeasured(), Unmeasured())
