"""Every example notebook runs in a real kernel, unchanged apart from a time limit.

The first one doesn't here: its cells are the README's blocks, which ``test_pages.py`` runs.
"""

from __future__ import annotations

import pathlib
import re

import nbformat
import pytest

from tests import kernels

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

_NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "example_notebooks").glob("*.ipynb"))
_CELL_TIMEOUT_S = 200.0  # some seconds on a quiet machine


def _run(path: pathlib.Path, kernel: kernels.Kernel) -> list[kernels.Outcome]:
    """Run the code cells, and fail at the first that fails."""
    return _run_cells(nbformat.read(path, as_version=4).cells, kernel)


def _run_cells(cells: list[nbformat.NotebookNode], kernel: kernels.Kernel) -> list[kernels.Outcome]:
    outcomes: list[kernels.Outcome] = []
    for cell in cells:
        if cell.cell_type == "code":
            outcomes.append(kernel.run(cell.source, _CELL_TIMEOUT_S))
            assert outcomes[-1].status == "ok", f"{cell.source}\n{outcomes[-1].traceback}"
    return outcomes


def _path(number: str) -> pathlib.Path:
    [path] = [path for path in _NOTEBOOKS if path.name.startswith(number)]
    return path


def _assert_accuracy(test: kernels.Outcome, before: str = "") -> None:
    """The last cell of most notebooks shows the accuracy, after some lines or none."""
    accuracy = re.fullmatch(rf"{before}test accuracy: (\d+\.\d) %\n", test.stdout)
    assert accuracy is not None, test.stdout
    assert float(accuracy[1]) >= 95


def test_second_notebook_accumulates_and_computes_in_bf16(kernel: kernels.Kernel) -> None:
    shown = _run(_path("02"), kernel)[-1].stdout
    lines = re.findall(r"^(.+?) +accuracy (\S+) % of (\d+), weights (\S+) % from the first$", shown, re.MULTILINE)
    assert [name for name, *_ in lines] == ["batches of 32", "4 x 8, accumulated", "batches of 32 in bf16"], shown
    for name, accuracy, tested, apart in lines:
        assert float(accuracy) >= 95
        assert tested == "450"  # each test image once
        assert float(apart) < (20 if "bf16" in name else 1)


def test_third_notebook_resumes_to_the_bit(kernel: kernels.Kernel) -> None:
    *_, interrupted, resumed, uninterrupted, test = _run(_path("03"), kernel)
    assert "stopped after 113 steps" in interrupted.result
    assert "goes on in epoch 4, after 100 steps" in resumed.stdout
    assert "equal to the bit: True" in uninterrupted.stdout
    _assert_accuracy(test)


def test_fourth_notebook_trains_on_the_cpu_where_there_is_no_tpu(kernel: kernels.Kernel) -> None:
    """``tests/xla`` runs the same notebook on an XLA device."""
    *_, training, test = _run(_path("04"), kernel)
    assert "trained on 1 x cpu" in training.stdout
    _assert_accuracy(test)


def test_fifth_notebook_explores_in_a_session(kernel: kernels.Kernel) -> None:
    outcomes = _run(_path("05"), kernel)
    shown = "\n".join(outcome.result for outcome in outcomes)
    assert "ranks 0-1: 22" in shown  # batches of each rank, of the 43 that there are
    assert re.search(r"rank 0: tensor\(.*\nrank 1: tensor\(", shown)
    norms = re.findall(r"loss (\S+), norm of the gradients (\S+)'", shown)
    assert len(norms) == 2 and norms[0][0] != norms[1][0] and norms[0][1] == norms[1][1]
    _assert_accuracy(outcomes[-1])


def test_sixth_notebook_restarts_and_trains_on_two_nodes(kernel: kernels.Kernel) -> None:
    *_, accidents, undisturbed, _, _, first, second = _run(_path("06"), kernel)
    assert "[restart 1 of 3: rank 1 was killed by SIGKILL]" in accidents.stdout
    assert re.search(r"\[restart 2 of 3: rank 0: RuntimeError: an accident at In\[\d+\], line \d+\]", accidents.stdout)
    begins = re.findall(r"attempt (\d) begins after (\d+) steps", accidents.stdout)
    assert begins == [("0", "0"), ("1", "10"), ("2", "30")]
    assert "equal to the bit: True" in undisturbed.stdout
    for rank in (0, 1):
        assert f"rank {rank} of 4, node 0 has gathered [0, 1, 2, 3]" in first.stdout
        assert f"{rank + 2} │ rank {rank + 2} of 4, node 1" in second.stdout


def test_eighth_notebook_trains_a_model_that_is_larger_than_a_rank(kernel: kernels.Kernel) -> None:
    *_, estimate, _, sharded, first, whole, second = _run(_path("08"), kernel)
    assert "fits one rank: False\nfits two ranks: True\n" in estimate.stdout
    assert re.findall(r"epoch (\d+): loss", sharded.stdout + whole.stdout) == [*map(str, range(1, 7))]
    for test, fits in ((first, True), (second, False)):
        _assert_accuracy(test, f"within the budget: {fits}\n")


@pytest.mark.usefixtures("state_home")
def test_ninth_notebook_finds_its_run_again_after_a_restart(tmp_path: pathlib.Path) -> None:
    cells = nbformat.read(_path("09"), as_version=4).cells
    [launch] = [cell for cell in cells if "--end_at 20s" in cell.source]
    launch.source = launch.source.replace("--end_at 20s", "--end_at 12s")  # until shortly before, both ranks compute
    [restart] = [number for number, cell in enumerate(cells) if "restart-kernel" in cell.metadata.get("tags", ())]
    folders = [tmp_path / "before", tmp_path / "after"]
    for folder in folders:
        folder.mkdir()
    with kernels.running(folders[0]) as kernel:
        _run_cells(cells[:restart], kernel)
        kernel.kill()
    with kernels.running(folders[1]) as kernel:
        runs, _, results, test = _run_cells(cells[restart:], kernel)
    assert "overnight" in runs.stdout
    steps = re.search(r"^steps of each rank: (\d+) (\d+)$", results.stdout, re.MULTILINE)
    assert steps is not None, results.stdout
    assert steps[1] == steps[2]
    _assert_accuracy(test)
