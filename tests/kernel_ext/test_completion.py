"""Tests of completion in a magic's line, requested from a real kernel as a front end does."""

from __future__ import annotations

import ast

import pytest

from notebook_accel import config
from tests import kernels

pytestmark = pytest.mark.front_end


def offered(kernel: kernels.Kernel, line: str, rest: str = "") -> list[str]:
    reply = f"get_ipython().kernel.do_complete({line + rest!r}, {len(line)})['matches']"
    return list(ast.literal_eval(kernel.value(reply)))


def test_flags(notebook: kernels.Kernel) -> None:
    assert offered(notebook, "%%distributed --num_p") == ["--num_processes"]
    assert offered(notebook, "%%distributed -n 2 --grace", "\nx = 1") == ["--grace_s"]
    every = offered(notebook, "%%distributed --")
    assert {f"--{option.name}" for option in config.fields()} <= set(every)
    assert {"--pull", "--push", "--out", "--background", "--no-use_cpu"} <= set(every)


@pytest.mark.parametrize("line", ["%%distributed --mixed_precision ", "%%distributed -n 2 --mixed_precision="])
def test_values_of_a_flag_that_has_a_few(notebook: kernels.Kernel, line: str) -> None:
    assert {"no", "bf16", "fp16"} <= set(offered(notebook, line))
    assert "bf16" in offered(notebook, f"{line}b")
    assert "--num_processes" not in offered(notebook, line)


def test_subcommands_and_the_runs_for_those_that_take_one(notebook: kernels.Kernel) -> None:
    assert offered(notebook, "%distributed st") == ["status", "stop", "stacks", "start"]
    assert {"config", "doctor", "logs"} <= set(offered(notebook, "%distributed "))
    assert "doctor" not in offered(notebook, "%distributed stop ")
    assert "--run" in offered(notebook, "%distributed stop --")
    assert "--run" not in offered(notebook, "%distributed doctor --")
    assert notebook.run("%%distributed -n 1 --start_method inline --name one_of_mine\n1").status == "ok"
    assert "one_of_mine" in offered(notebook, "%distributed logs --run ")
    assert "one_of_mine" in offered(notebook, "%distributed stacks --run one")


def test_the_body_of_the_cell_is_python(notebook: kernels.Kernel) -> None:
    notebook.run("mountains = 1")
    assert "mountains" in offered(notebook, "%%distributed -n 2\nmount")
