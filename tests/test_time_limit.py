"""The time limit of a run: what the option and the environment say."""

from __future__ import annotations

import datetime

import pytest

from notebook_accel import config, time_limit
from notebook_accel.errors import ConfigError

_NOON_S = datetime.datetime(2026, 5, 1, 12, 0).timestamp()


@pytest.mark.parametrize(
    ("text", "after_s"),
    [
        ("90m", 5400.0),
        ("11.5h", 41400.0),
        ("11:30h", 41400.0),
        ("1h30m", 5400.0),
        ("2d", 172800.0),
        ("45s", 45.0),
        ("23:30", 41400.0),
        ("12:00:05", 5.0),
        ("11:00", 82800.0),  # tomorrow's
        ("12:00", 86400.0),
        ("2026-05-01T13:00", 3600.0),
        ("2026-05-01 13:00", 3600.0),
        ("2026-05-01T11:00", -3600.0),  # past, which the checks before a launch refuse
    ],
)
def test_a_time_is_the_one_that_its_text_states(text: str, after_s: float) -> None:
    assert time_limit.parse(text, _NOON_S) == pytest.approx(_NOON_S + after_s)


def test_a_time_with_a_zone_is_in_that_zone() -> None:
    assert time_limit.parse("1970-01-01T01:00Z") == 3600.0
    assert time_limit.parse("1970-01-01T01:00+01:00") == 0.0


@pytest.mark.parametrize(
    "text", ["soon", "25:00", "12:60", "90", "1h 30m", "-5m", "2026-13-01T08:00", "11:60h", "1e3s"]
)
def test_what_is_no_time_is_refused_with_the_ways_to_state_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"23:30.*11\.5h"):
        config.resolve({"end_at": text}, environ={})


def test_the_option_comes_before_the_limit_of_the_slurm_job() -> None:
    slurm = {time_limit.SLURM_END: "1000"}
    assert time_limit.end_of("", slurm) == 1000.0
    assert time_limit.end_of("1970-01-01T00:00Z", slurm) == 0.0
    assert time_limit.end_of("", {}) is None
    assert time_limit.end_of("", {time_limit.SLURM_END: "Unknown"}) is None


def test_a_rank_believes_its_launch_and_not_the_slurm_job_of_an_earlier_one() -> None:
    slurm = {time_limit.SLURM_END: "1000"}
    assert time_limit.end_of("", {**slurm, time_limit.TIME_LIMIT: ""}) is None
    assert time_limit.end_of("", {**slurm, time_limit.TIME_LIMIT: "2000"}) == 2000.0


def test_the_margin_of_a_rank_is_that_of_its_launch() -> None:
    assert time_limit.margin_of(time_limit.variables("1h", 7.5)) == 7.5
    assert time_limit.margin_of({}) == time_limit.DEFAULT_MARGIN_S
