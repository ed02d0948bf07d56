"""The phases of a step in the panel."""

from __future__ import annotations

import dataclasses

import pytest

from kernel_ext import step_view
from notebook_accel.launching.state.diagnosis import Diagnosis, Verdict
from notebook_accel.launching.state.step_times import Moment
from notebook_accel.protocol import events
from tests.kernel_ext import fake_runs

_PHASES = {"data": 0.045, "forward": 0.020, "backward": 0.030, "waiting": 0.005}
_VERDICT = Verdict("data", 0.45, "Every rank waits 45 % of each step for <data>.", "Try `num_workers=4`.", (0, 1))


def diagnosis(world_size: int = 2, verdicts: tuple[Verdict, ...] = (_VERDICT,)) -> Diagnosis:
    steps = {rank: {**dict.fromkeys(events.PHASES, 0.0), **_PHASES} for rank in range(world_size)}
    return Diagnosis(verdicts, steps, wasted_s=90.0, run_s=200.0)


def test_step_in_words_names_its_largest_phases() -> None:
    assert step_view.step_text(_PHASES) == "100 ms: data 45%, backward 30%, forward 20%"
    assert step_view.step_text(None) == "\N{EN DASH}"


def test_bar_has_a_part_for_each_phase_and_text_for_those_who_see_none() -> None:
    drawn = fake_runs.Document(step_view.bar_html(_PHASES))
    [bar] = drawn.having(role="img")
    assert bar["aria-label"] == "100 ms: data 45%, backward 30%, forward 20%"
    assert drawn.text == "100 ms"
    widths = {part["class"]: part["style"] for tag, part in drawn.elements if tag == "i"}
    assert widths == {
        "nba-p-data": "width:45.0%",
        "nba-p-forward": "width:20.0%",
        "nba-p-backward": "width:30.0%",
        "nba-p-waiting": "width:5.0%",
    }


def test_answer_stands_in_the_header_and_in_the_summary_that_stays() -> None:
    run = fake_runs.training()
    header = fake_runs.header_of(run, diagnosis=diagnosis())
    assert "Every rank waits 45 % of each step for <data>." in header.text
    shown = fake_runs.summary_of(run, diagnosis=diagnosis()).text
    assert "Try `num_workers=4`." in shown
    assert "Cost so far: 01:30 of 03:20." in shown
    text = fake_runs.text_of(run, diagnosis=diagnosis())
    assert "Every rank waits 45 % of each step for <data>. Try `num_workers=4`." in text
    assert "100 ms: data 45%, backward 30%, forward 20%" in text


def test_without_an_answer_nothing_is_said() -> None:
    run = fake_runs.training()
    shown = fake_runs.summary_of(run, diagnosis=diagnosis(verdicts=()))
    assert "Why slow" not in shown.text and "time of a step" in shown.text
    assert "time of a step" not in fake_runs.summary_of(run).text


def test_tab_shows_the_phases_of_few_ranks_side_by_side() -> None:
    shown = step_view.step_html(diagnosis(3))
    assert [f"rank {rank}" in shown for rank in range(4)] == [True, True, True, False]
    assert "45 ms" in shown
    assert "evaluation" not in shown  # no rank had any


def test_tab_shows_the_mean_of_many_ranks_and_the_one_that_waits_least() -> None:
    found = diagnosis(64)
    found.steps[9].update(forward=0.5, waiting=0.0)  # type: ignore[attr-defined]
    shown = step_view.step_html(found)
    assert "mean of 64 ranks" in shown
    assert "rank 9" in shown
    assert "500 ms" in shown


def with_course(found: Diagnosis, *, highest: float = 1.0) -> Diagnosis:
    """Add a course of 20 parts, whose last steps take ``highest`` times as long."""
    shown = list(found.steps) if len(found.steps) <= 4 else [0]
    moments = []
    for number in range(20):
        steps = {name: seconds * (highest if number == 19 else 1.0) for name, seconds in _PHASES.items()}
        moments.append(Moment(2.0 * number, 2.0 * number + 2, steps, dict.fromkeys(shown, steps)))
    return dataclasses.replace(found, over_time=tuple(moments))


@pytest.mark.parametrize(("world_size", "titles"), [(2, ["rank 0", "rank 1"]), (64, ["mean of 64 ranks", "rank 0"])])
def test_tab_shows_the_course_of_the_columns(world_size: int, titles: list[str]) -> None:
    shown = step_view.step_html(with_course(diagnosis(world_size)))
    charts = [
        about for about in fake_runs.Document(shown).having(role="img") if "at the end" in (about["aria-label"] or "")
    ]
    assert [about["aria-label"] for about in charts] == [f"{title}: 100 ms a step at the end" for title in titles]
    assert "cut off" not in shown
    assert "nba-area" not in step_view.step_html(diagnosis(world_size))


def test_a_rare_peak_is_cut_off_and_said() -> None:
    shown = step_view.step_html(with_course(diagnosis(), highest=30.0))
    assert "cut off at the top: the highest is 3,000 ms" in shown
    assert "100 ms" in shown


def test_summary_keeps_the_course() -> None:
    shown = fake_runs.summary_of(fake_runs.training(), diagnosis=with_course(diagnosis()))
    assert shown.source.count('class="nba-area"') == 2


@pytest.mark.parametrize(
    ("found", "said"),
    [(Diagnosis(), "Too few steps have been measured yet."), (diagnosis(verdicts=()), "Nothing stands out")],
)
def test_tab_without_an_answer(found: Diagnosis, said: str) -> None:
    assert said in step_view.step_html(found)


def test_ranks_that_share_a_row_share_a_bar() -> None:
    run = fake_runs.FakeRun(64)
    for rank in range(64):
        run.apply(rank, events.Started(time_s=0.0, pid=1))
        run.apply(rank, events.Progress(time_s=0.0, step=1, steps=1))
    shown = fake_runs.summary_of(run, 1.0, diagnosis=diagnosis(64))
    assert (
        shown.source.count('class="nba-phases"') == 1 + 64 + 2
    )  # the shared row, the table of all ranks, and the phases
