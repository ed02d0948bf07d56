"""Tests of completion in a magic's line, requested from a real kernel as a front end does."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from notebook_accel import config
from tests import kernels

pytestmark = pytest.mark.front_end


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kernels.Kernel]:
    with kernels.running(tmp_path_factory.mktemp("notebook")) as kernel:
        assert kernel.run(f"%load_ext notebook_accel\n{kernels.END_TEMPLATE}").status == "ok"
        yield kernel


def _offered(kernel: kernels.Kernel, line: str, rest: str = "") -> list[str]:
    reply = f"get_ipython().kernel.do_complete({line + rest!r}, {len(line)})['matches']"
    return list(ast.literal_eval(kernel.value(reply)))


def test_flags(notebook: kernels.Kernel) -> None:
    assert _offered(notebook, "%%distributed --num_p") == ["--num_processes"]
    assert _offered(notebook, "%%distributed -n 2 --grace", "\nx = 1") == ["--grace_s"]
    every = _offered(notebook, "%%distributed --")
    assert {f"--{option.name}" for option in config.fields()} <= set(every)
    assert {"--pull", "--push", "--out", "--background", "--no-use_cpu"} <= set(every)


@pytest.mark.parametrize("line", ["%%distributed --mixed_precision ", "%%distributed -n 2 --mixed_precision="])
def test_values_of_a_flag_that_has_a_few(notebook: kernels.Kernel, line: str) -> None:
    assert {"no", "bf16", "fp16"} <= set(_offered(notebook, line))
    assert "bf16" in _offered(notebook, f"{line}b")
    assert "--num_processes" not in _offered(notebook, line)


def test_subcommands(notebook: kernels.Kernel) -> None:
    assert _offered(notebook, "%distributed st") == ["status", "stop", "stacks", "start"]
    assert {"config", "doctor", "logs"} <= set(_offered(notebook, "%distributed "))
    assert "doctor" not in _offered(notebook, "%distributed stop ")


def test_runs_by_name_for_the_commands_that_take_one(notebook: kernels.Kernel) -> None:
    assert "--run" in _offered(notebook, "%distributed stop --")
    assert "--run" not in _offered(notebook, "%distributed doctor --")
    assert notebook.run("%%distributed -n 1 --start_method inline --name one_of_mine\n1").status == "ok"
    assert "one_of_mine" in _offered(notebook, "%distributed logs --run ")
    assert "one_of_mine" in _offered(notebook, "%distributed stacks --run one")


def test_the_body_of_the_cell_is_python(notebook: kernels.Kernel) -> None:
    notebook.run("mountains = 1")
    assert "mountains" in _offered(notebook, "%%distributed -n 2\nmount")


def test_it_goes_with_the_extension(notebook: kernels.Kernel) -> None:
    notebook.run("%unload_ext notebook_accel")
    assert "--num_processes" not in _offered(notebook, "%%distributed --num")
    assert "status" not in _offered(notebook, "%distributed st")
    notebook.run("%load_ext notebook_accel")
    assert "--num_processes" in _offered(notebook, "%%distributed --num")
