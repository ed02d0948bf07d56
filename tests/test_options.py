"""Flags are made from the options."""

from __future__ import annotations

import argparse

import pytest

from notebook_accel import config
from notebook_accel.errors import ConfigError


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="%%distributed", exit_on_error=False)
    config.add_flags(parser)
    return parser


def test_every_option_is_a_flag_with_its_help_and_default(parser: argparse.ArgumentParser) -> None:
    shown = " ".join(parser.format_help().split())
    for option in config.fields():
        assert f"--{option.name}" in shown
        assert " ".join(option.help.split()) in shown
        if option.default not in (None, "", ()):
            assert f"Default: {option.default}." in shown
        for choice in option.choices:
            assert choice in shown


def test_only_what_was_given_is_given(parser: argparse.ArgumentParser) -> None:
    assert config.given_flags(parser.parse_args([])) == {}
    flags = "--num_processes 2 --mixed_precision bf16 --use_cpu --no-allow_initialized_cuda --grace_s 0 --name run"
    assert config.given_flags(parser.parse_args(flags.split())) == {
        "num_processes": 2,
        "mixed_precision": "bf16",
        "use_cpu": True,
        "allow_initialized_cuda": False,
        "grace_s": 0.0,
        "name": "run",
    }


def test_short_flag(parser: argparse.ArgumentParser) -> None:
    assert config.given_flags(parser.parse_args(["-n", "3"])) == {"num_processes": 3}


@pytest.mark.parametrize("flags", [["--num_processes", "two"], ["--mixed_precision", "int8"], ["--grace_s", "-1"]])
def test_value_that_is_not_allowed_is_refused_by_the_configuration(
    parser: argparse.ArgumentParser, flags: list[str]
) -> None:
    given = config.given_flags(parser.parse_args(flags))
    with pytest.raises(ConfigError, match=flags[0].removeprefix("--")):
        config.resolve(given, environ={})
