"""Verdicts on steps, from times given by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from notebook_accel.launching.state.diagnosis import Diagnosis, diagnose
from notebook_accel.launching.state.run import RunState
from notebook_accel.protocol import events

_STEPS_PER_S = 20


def run(*ranks: dict[str, Any], seconds: int = 5) -> RunState:
    """A run with ranks of these phases (ms in a step) and other fields of the event."""
    return go_on(RunState(len(ranks)), *ranks, seconds=seconds)


def go_on(state: RunState, *ranks: dict[str, Any], seconds: int = 1) -> RunState:
    """Add seconds in which the ranks of a run do steps of these phases."""
    for _ in range(seconds):
        for rank, given in zip(state.ranks, ranks, strict=True):
            steps = 0 if rank.steps is None else rank.steps + _STEPS_PER_S
            second = steps / _STEPS_PER_S
            state.apply(rank.rank, events.Progress(time_s=second, step=steps, steps=steps))
            state.apply(rank.rank, step_times(time_s=second, **given))
    return state


def step_times(*, lines: tuple[tuple[Any, ...], ...] = (), **given: Any) -> events.StepTimes:
    phases = {name: given.pop(name, 0.0) * _STEPS_PER_S / 1000 for name in events.PHASES}
    fields = {"steps": _STEPS_PER_S, "workers": 0, "cores": 2, "samples": 20, **given}
    return events.StepTimes(seconds=phases, lines=[events.SampledLine(*line) for line in lines], **fields)


def healthy(**changes: Any) -> dict[str, Any]:
    """A rank of 50 ms a step that computes."""
    return {
        "data": 2.0,
        "forward": 14.0,
        "backward": 26.0,
        "communication": 2.0,
        "optimizer": 5.0,
        "other": 1.0,
    } | changes


def line(phase: str, *, activity: str = "", number: int = 12, text: str = "", samples: int = 10) -> tuple[Any, ...]:
    return (phase, activity, f"In[4], line {number}", text, samples)


def test_run_without_steps_has_no_diagnosis() -> None:
    assert diagnose(RunState(2)) == Diagnosis()
    assert str(Diagnosis()) == "Too few steps have been measured yet."
    assert not diagnose(run(*[healthy()] * 2, seconds=2)).steps


_PLACE = "In[4], line 12"
_SAVING = line("other", activity="saving", text="torch.save(state, path)")
_OWN_COLLECTIVE = line("other", activity="communication", text="dist.barrier()")
_COMPILING = line("forward", activity="compiling", text="loss = model(x)")
_RECOMPILED = "0/0: tensor 'x' size mismatch at index 0. expected 8, actual 9"


@pytest.mark.parametrize(
    ("ranks", "cause", "blamed", "place", "share"),
    [
        ([healthy(data=60.0, lines=(line("data"), line("forward", number=1)))] * 2, "data", (0, 1), _PLACE, 0.556),
        ([healthy(communication=55.0, gradient_bytes=440 << 20)] * 2, "communication", (0, 1), "", 0.534),
        ([healthy(communication=60.0, lines=(_OWN_COLLECTIVE,))] * 2, "communication", (0, 1), _PLACE, 0.556),
        # These collectives take longer than the gradients.
        (
            [healthy(communication=60.0, lines=(_OWN_COLLECTIVE,), gradient_bytes=2 << 20)] * 2,
            *("communication", (0, 1), _PLACE, 0.556),
        ),
        (
            [healthy(evaluation=50.0, evaluations=20, lines=(line("evaluation", text="test(model)"),))] * 2,
            *("evaluation", (0, 1), _PLACE, 0.5),
        ),
        ([healthy(other=50.0, lines=(_SAVING,))] * 2, "checkpoint", (0,), _PLACE, 0.5),
        # The others wait for the one rank that saves.
        ([healthy(other=50.0, lines=(_SAVING,)), healthy(communication=52.0)], "checkpoint", (0,), _PLACE, 0.5),
        (
            [healthy(compilations=3, compiling_s=0.5, recompiled=_RECOMPILED, lines=(_COMPILING,))],
            *("compilation", (0,), _PLACE, 0.5),
        ),
        ([healthy(other=50.0, lines=(line("other", text="draw(loss)"),))], "other code", (0,), _PLACE, 0.505),
        *(
            ([healthy(is_on_device=True, lines=(line("forward", text=text),))], "device wait", (0,), _PLACE, 0.5)
            for text in ("total += loss.item()", "print(loss)", "x = out.cpu()", "torch.cuda.empty_cache()")
        ),
    ],
)
def test_cause_is_found_with_its_ranks_its_place_and_its_share(
    ranks: list[dict[str, Any]], cause: str, blamed: tuple[int, ...], place: str, share: float
) -> None:
    [verdict] = diagnose(run(*ranks)).verdicts
    assert (verdict.cause, verdict.ranks, verdict.place) == (cause, blamed, place)
    assert verdict.share == pytest.approx(share, abs=1e-3)
    assert (_RECOMPILED in verdict.what) == (cause == "compilation")


@pytest.mark.parametrize(
    ("data", "nodes", "fix"),
    [
        ({"workers": 2, "cores": 64}, 1, "num_workers=4"),
        ({"workers": 0, "cores": 64}, 1, "Try `num_workers=4, persistent_workers=True`."),
        ({"workers": 0, "cores": 8}, 4, "Try `num_workers=4, persistent_workers=True`."),  # two ranks on each
    ],
)
def test_advice_for_data_goes_by_the_workers_and_the_cores_of_one_machine(
    data: dict[str, int], nodes: int, fix: str
) -> None:
    state = run(*[healthy(data=60.0, **data)] * 2 * nodes)
    for rank in state.ranks:
        rank.node = rank.rank // 2
    [verdict] = diagnose(state).verdicts
    assert fix in verdict.fix


def test_verdict_is_a_sentence_with_its_figures_and_what_to_do() -> None:
    slow = healthy(forward=74.0, lines=(line("forward", text="time.sleep(1)"),))
    assert diagnose(run(healthy(communication=62.0), slow)).sentence == (
        "Rank 1 computes 2.2 times as long as the others, most of it in forward at In[4], line 12: `time.sleep(1)`; "
        "the others wait for it 55 % of the time. Give this rank less work, or look for what else runs on its device "
        "or core."
    )


def test_workers_are_advised_only_where_they_help() -> None:
    stream = healthy(data=60.0, is_stream=True)
    [verdict] = diagnose(run(stream)).verdicts
    assert "Every worker yields all of an IterableDataset" in verdict.fix
    assert verdict.fix.endswith("if it does, try `num_workers=2, persistent_workers=True`.")
    restarting = healthy(data=60.0, workers=2, starting_s=0.9)
    [verdict] = diagnose(run(restarting)).verdicts
    assert verdict.fix.startswith("Its workers start anew in each epoch. Try `persistent_workers=True`")
    for workers, fix in [
        (0, "Try a larger batch, or prepare the data once. Workers don't help: "),
        (2, "Try a larger batch, or `num_workers=4`."),  # none would make the wait longer
    ]:
        [verdict] = diagnose(run({"data": 30.0, "forward": 20.0, "steps": 1000, "workers": workers})).verdicts
        assert verdict.fix.startswith(fix)
        assert "_workers=" not in verdict.fix.removeprefix(fix)


@pytest.mark.parametrize("phase", ["data", "forward", "backward", "optimizer", "other"])
def test_straggler_is_the_rank_that_waits_least(phase: str) -> None:
    slow = healthy(lines=(line(phase, text="time.sleep(1)"),))
    slow[phase] += 60.0
    waiting = healthy(communication=62.0)
    diagnosis = diagnose(run(waiting, waiting, slow, waiting))
    [verdict] = diagnosis.verdicts
    assert (verdict.cause, verdict.ranks, verdict.place) == ("straggler", (2,), "In[4], line 12")
    assert verdict.share == pytest.approx(0.545, abs=1e-3)
    assert diagnosis.steps[0]["waiting"] == pytest.approx(0.060)
    assert diagnosis.steps[2]["waiting"] == 0


@pytest.mark.parametrize(("phase", "is_sharded"), [("forward", True), ("forward", False), ("other", True)])
def test_collectives_of_a_sharded_model_are_told_from_the_users_own(phase: str, is_sharded: bool) -> None:
    state = run(*[healthy(communication=60.0, lines=(line(phase, activity="communication", text="model(x)"),))] * 2)
    for number in range(2):
        held = 500 if is_sharded else 1000
        state.apply(number, events.ModelMemory(parameters=1000, held_parameters=held, parameter_bytes=4 * held))
    [verdict] = diagnose(state).verdicts
    assert (verdict.cause, verdict.place) == ("communication", "In[4], line 12")
    assert ("`reshard_after_forward=False`" in verdict.fix) == (is_sharded and phase == "forward")


@pytest.mark.parametrize("phase", ["evaluation", "other"])
def test_collectives_of_an_evaluation_or_of_waiting_ranks_do_not_hide_slow_gradients(phase: str) -> None:
    rank = healthy(communication=25.0, gradient_bytes=440 << 20)
    gathering = {"lines": (line(phase, activity="communication", text="gather(x)", samples=8),)}
    ranks = [rank | gathering] * 2 if phase == "evaluation" else [rank, rank | gathering | {"communication": 32.0}]
    [verdict] = diagnose(run(*ranks)).verdicts
    assert (verdict.cause, verdict.place) == ("communication", "")


@pytest.mark.parametrize(("communication", "causes"), [(2.0, []), (40.0, ["communication"])])
def test_waiting_in_turns_is_no_communication(communication: float, causes: list[str]) -> None:
    ranks = [healthy(communication=communication, waiting=50.0, gradient_bytes=26 << 20)] * 2
    diagnosis = diagnose(run(*ranks))
    assert [verdict.cause for verdict in diagnosis.verdicts] == causes
    assert [phases["waiting"] for phases in diagnosis.steps.values()] == pytest.approx([0.050] * 2)


def late_in(*seconds: int) -> RunState:
    """A run of six seconds, in some of which rank 0 waits for rank 1."""
    state = RunState(2)
    for second in range(6):
        late_ms = 40.0 * (second in seconds)
        go_on(state, healthy(communication=2.0 + late_ms), healthy(forward=14.0 + late_ms))
    return state


@pytest.mark.parametrize(("late", "causes"), [((0, 1, 2, 3, 4, 5), ["straggler"]), ((4, 5), [])])
def test_rank_is_late_if_it_was_in_both_halves_of_the_last_steps(late: tuple[int, ...], causes: list[str]) -> None:
    assert [verdict.cause for verdict in diagnose(late_in(*late)).verdicts] == causes


@pytest.mark.parametrize(
    ("seconds", "late_from", "late_ms", "causes"),
    [(45, 0, 12.0, ["straggler"]), (20, 0, 12.0, []), (45, 33, 12.0, []), (20, 0, 40.0, ["straggler"])],
)
def test_rank_that_is_a_little_late_must_have_been_so_for_half_a_minute(
    seconds: int, late_from: int, late_ms: float, causes: list[str]
) -> None:
    state = run(healthy(), healthy(), seconds=late_from)
    go_on(state, healthy(communication=2.0 + late_ms), healthy(forward=14.0 + late_ms), seconds=seconds - late_from)
    assert [verdict.cause for verdict in diagnose(state).verdicts] == causes


def test_recompilation_by_xla() -> None:
    state = run(healthy(compilations=1, compiling_s=0.5, recompiled="The batch's shape has changed"))
    state.ranks[0].device = "xla:0"
    [verdict] = diagnose(state).verdicts
    assert "torch.compile" not in str(verdict)
    state = run(healthy(compilations=20, compiling_s=0.5))  # in each step, and the batches have one shape
    state.ranks[0].device = "xla:0"
    [verdict] = diagnose(state).verdicts
    assert (verdict.cause, verdict.share) == ("compilation", pytest.approx(0.5))


@pytest.mark.parametrize(("seconds", "is_named"), [(10, True), (200, False)])
def test_first_step_that_compiles_counts_as_long_as_it_is_a_tenth_of_the_run(seconds: int, is_named: bool) -> None:
    state = RunState(1)
    state.apply(0, events.Progress(step=0, steps=0))
    compiling = line("forward", activity="compiling", text="loss = model(x)")
    # Ranks report once a second: the rest of a long first step comes with the second event.
    state.apply(0, step_times(forward=50.0, steps=1, compiling_s=1.0, lines=(compiling,)))
    state.apply(0, step_times(forward=450.0, compilations=1, compiling_s=9.0, lines=(compiling,)))
    for _ in range(seconds):
        state.apply(0, step_times(**healthy()))
    diagnosis = diagnose(state)
    assert sum(diagnosis.steps[0].values()) == pytest.approx(0.050)
    assert [verdict.cause for verdict in diagnosis.verdicts] == ["compilation"] * is_named
    if is_named:
        assert diagnosis.verdicts[0].place == "In[4], line 12"
        assert diagnosis.wasted_s == pytest.approx(10.0)


def test_rank_that_waits_for_a_core_is_late() -> None:
    [verdict] = diagnose(run(healthy(forward=60.0, queued_s=0.5), healthy(communication=48.0))).verdicts
    assert (verdict.cause, verdict.ranks) == ("straggler", (0,))
    assert verdict.what.endswith("It waits for a core 26 % of the time, since other work uses it.")


@pytest.mark.parametrize("cause", ["straggler", "communication"])
def test_no_rank_and_no_exchange_is_blamed_where_all_wait_for_cores(cause: str) -> None:
    exchanging = {"communication": 40.0, "gradient_bytes": 440 << 20}
    ranks = [{"forward": 52.0}, {"communication": 40.0}] if cause == "straggler" else [exchanging] * 2
    for queued_s, causes in ((0.3, [cause]), (0.9, [])):
        found = diagnose(run(*[healthy(queued_s=queued_s, **changes) for changes in ranks])).verdicts
        assert [verdict.cause for verdict in found] == causes


def test_device_of_a_rank_that_is_late() -> None:
    state = run(healthy(forward=60.0), healthy(communication=48.0))
    memory = events.Memory(used_bytes=1, total_bytes=2, kind="device", utilisation=99.0, clock=61.0)
    state.apply(0, memory)
    [verdict] = diagnose(state).verdicts
    assert verdict.what.endswith(" Its device is busy 99 % of the time. Its device runs at 61 % of its highest clock.")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data": 4.0},
        {"communication": 4.0, "gradient_bytes": 100 << 20},
        {"communication": 60.0, "gradient_bytes": 20_000, "steps": 60},  # the latency of a toy program
        {"evaluation": 15.0},
        {"evaluation": 50.0, "evaluations": 1},  # a rare one
        {"lines": (line("forward", text="loss.item()"),)},  # the CPU has nothing to wait for
        {"compilations": 0, "compiling_s": 0.5},
        {"other": 4.0, "lines": (line("other", text="print(loss)"),)},
        {"copy": 3.0, "is_on_device": True},
        {"queued_s": 0.9},
        {"compilations": 1, "compiling_s": 0.02},
        {"lines": (line("forward", text="loss.item()", samples=1),), "is_on_device": True},
        {"lines": (line("other", activity="saving", samples=1),)},
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_healthy_program_has_no_verdict(changes: dict[str, Any], world_size: int) -> None:
    diagnosis = diagnose(run(*[healthy(**changes)] * world_size))
    assert diagnosis.verdicts == ()
    assert diagnosis.sentence == ""
    assert str(diagnosis).startswith("Nothing stands out")


def test_costliest_cause_comes_first_and_is_priced_over_the_whole_run() -> None:
    ranks = [healthy(data=25.0, other=60.0, lines=(line("other"), line("data", number=3)))] * 2
    diagnosis = diagnose(run(*ranks, seconds=11))
    assert [verdict.cause for verdict in diagnosis.verdicts] == ["other code", "data"]
    assert diagnosis.sentence == str(diagnosis.verdicts[0])
    assert diagnosis.wasted_s == pytest.approx(11 * 20 * 0.060)
    assert diagnosis.cost == "Cost so far: 00:13 of 00:29."


def test_cause_that_began_late_is_priced_for_its_own_time() -> None:
    diagnosis = diagnose(go_on(run(*[healthy()] * 2, seconds=60), *[healthy(data=52.0)] * 2, seconds=12))
    assert [verdict.cause for verdict in diagnosis.verdicts] == ["data"]
    assert (diagnosis.wasted_s, diagnosis.run_s) == (
        pytest.approx(72 * 20 * 0.002 + 12 * 20 * 0.050),
        pytest.approx(84),
    )


@pytest.mark.parametrize(("seconds", "causes"), [(60, []), (10, ["other code"])])
def test_single_pause_is_a_cause_only_if_it_takes_a_tenth_of_the_run(seconds: int, causes: list[str]) -> None:
    state = run(*[healthy()] * 2, seconds=seconds)
    for other in (100.0, 150.0, 0.0, 0.0):  # the pause begins in an event that was sent meanwhile
        go_on(state, *[healthy(other=other, lines=(line("other"),))] * 2)
    assert [verdict.cause for verdict in diagnose(state).verdicts] == causes


def test_answer_without_a_cause_names_the_longest_phase() -> None:
    diagnosis = diagnose(run(*[healthy(evaluation=250.0, evaluations=1)] * 2))
    assert str(diagnosis).startswith("Nothing stands out. The longest phase is evaluation, 83 % of a step.\n")


def test_phases_add_up_to_the_step_and_go_into_json() -> None:
    diagnosis = diagnose(run(healthy(communication=62.0), healthy(forward=74.0)))
    data = json.loads(json.dumps(diagnosis.to_dict()))
    assert set(data["steps"]) == {"0", "1"}
    for phases in data["steps"].values():
        assert set(phases) == set(events.PHASES)
        assert sum(phases.values()) == pytest.approx(0.110)
    assert data["verdicts"][0]["cause"] == "straggler"
