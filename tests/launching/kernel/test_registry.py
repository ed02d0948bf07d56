"""Runs by name and number."""

from __future__ import annotations

import collections
import gc
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import NotebookAccelError
from notebook_accel.launching.kernel import detached_runs, registry
from notebook_accel.launching.kernel.job import Job, LaunchRequest
from notebook_accel.launching.ranks.worker import Target
from notebook_accel.launching.spec import JobSpec
from tests.launching.test_run_folders import ended, held


@pytest.fixture(autouse=True)
def _entries(monkeypatch: pytest.MonkeyPatch, state_home: pathlib.Path) -> Iterator[None]:
    monkeypatch.setattr(registry, "_entries", collections.deque(maxlen=50))
    return


def started(name: str) -> Job:
    spec = JobSpec(name=name, world_size=1, environment={}, working_directory="/", sys_path=[])
    job = Job(LaunchRequest(Target({}), {}, spec, LaunchConfig(), "1 CPU"))
    registry.add(job)
    return job


def refused(which: str = "", *, running: bool = False) -> str:
    with pytest.raises(NotebookAccelError) as caught:
        registry.find(which, running=running)
    return str(caught.value)


def test_without_a_name_it_is_the_one_that_goes_on_or_the_last_one() -> None:
    assert refused() == "There is no run.\nFix: start one, with %%distributed or notebook_launcher"
    first, second = started("first"), started("second")
    assert refused() == "Several runs are in progress.\nFix: name one with --run: 1 (first), 2 (second)"
    second.end("stopped")
    third = started("third")
    assert refused() == "Several runs are in progress.\nFix: name one with --run: 1 (first), 3 (third)"
    third.end("stopped")
    assert registry.find().name == "first"
    first.end("stopped")
    assert registry.find().name == "third"
    assert (
        refused(running=True) == "There is no run in progress.\nFix: start one, with %%distributed or notebook_launcher"
    )


def test_name_or_number_finds_it_and_of_one_name_the_one_that_goes_on() -> None:
    kept = [started("train"), started("train"), started("other")]
    kept[1].end("stopped")
    assert [registry.find(which).number for which in ("train", "2", "other")] == [1, 2, 3]
    assert refused("nowhere").startswith(
        "There is no run 'nowhere'.\nFix: name one of: 1 (train), 2 (train), 3 (other)"
    )
    assert refused("2", running=True) == "The run '2' has ended.\nFix: name one of: 1 (train), 3 (other)"
    for job in kept:
        job.end("stopped")
    assert refused("train", running=True) == (
        "The run 'train' has ended.\nFix: %distributed status --run train shows how it ended"
    )


def test_number_counts_before_a_name_that_looks_like_one() -> None:
    kept = [started("2"), started("train")]
    assert registry.find("2").name == "train"
    for job in kept:
        job.end("stopped")
    assert registry.find("2").name == "train"


def test_of_several_that_go_on_under_one_name_none_is_taken() -> None:
    kept = [started("train"), started("train")]
    for running in (True, False):
        assert refused("train", running=running) == (
            "Several runs named 'train' are in progress.\n"
            "Fix: --run 1 or --run 2; %distributed status shows when each began"
        )
    assert registry.find("1", running=True).job is kept[0]


def test_detached_run_that_this_notebook_does_not_know_is_to_be_attached() -> None:
    ended("day")
    with held("a night"):
        for said in (refused("a night", running=True), refused("a night"), refused(running=True), refused()):
            assert said.endswith(
                " in this notebook.\nThis notebook isn't attached to the detached run 'a night'.\n"
                "Fix: %distributed attach 'a night'"
            )
        kept = started("first")
        assert refused("day", running=True).endswith(f"Fix: name one of: 1 ({kept.name})")
        assert refused("day").endswith("Fix: %distributed attach day")


def test_detached_run_that_is_over_is_not_to_be_attached_while_its_agent_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(detached_runs, "is_ending", lambda _: True)
    with held():
        assert refused(running=True).startswith("There is no run in progress.\n")
        assert refused("night").endswith("Fix: %distributed attach night")


def test_those_that_go_on_are_listed_and_the_last_one_that_has_ended() -> None:
    kept = [started(str(number)) for number in range(4)]
    kept[0].end("stopped")
    kept[3].end("stopped")
    assert [entry.name for entry in registry.latest()] == ["1", "2", "3"]


def test_remembering_a_run_keeps_nothing_of_it() -> None:
    job = started("gone")
    job.end("stopped")
    del job
    gc.collect()
    entry = registry.find("gone")
    assert (entry.job, entry.is_running, entry.number) == (None, False, 1)


def test_at_every_moment_in_which_a_run_ends_it_is_listed_with_all_that_belongs_to_it() -> None:
    job = started("bad")
    (entry,) = registry.latest()
    seen = []

    def look(frame: types.FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename.endswith(("launching/kernel/job.py", "launching/state/run.py")):
            sys.settrace(None)
            seen.append((entry.ending.status, entry.ending.why, entry.ending.took_s > 0.0))
            sys.settrace(look)
        return look

    sys.settrace(look)
    try:
        job.end("timeout")
    finally:
        sys.settrace(None)
    assert {at_once for at_once in seen if at_once[0]} == {("failed", "timeout_s has run out", True)}
    assert seen[0] == ("", "", False)


def test_run_that_ends_while_runs_are_listed_is_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    started("first").end("stopped")
    job = started("second")
    is_running = registry.Entry.is_running
    assert isinstance(is_running, property)

    def ends_once_asked(entry: registry.Entry) -> bool:
        assert is_running.fget is not None
        answer = bool(is_running.fget(entry))
        if answer:
            job.end("stopped")
        return answer

    monkeypatch.setattr(registry.Entry, "is_running", property(ends_once_asked))
    assert [entry.name for entry in registry.latest()] == ["first", "second"]
