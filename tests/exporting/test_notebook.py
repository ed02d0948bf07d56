"""The script that a real kernel exports, run by python and by torchrun."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests import kernels

_CELLS = """
from collections import namedtuple

from torch.utils.data import DataLoader, TensorDataset
---
%%time
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, x):
        return self.line(x) * FACTOR

Outcome = namedtuple("Outcome", "rank loss")
---
FACTOR = 1.0
x = torch.linspace(-1, 1, 64).reshape(-1, 1)
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=8)
"""
_CELL = """
from notebook_accel import Accelerator

accelerator = Accelerator()
net, optimizer, loader = accelerator.prepare(model, optimizer, loader)
rate = !echo {FACTOR}
for a, b in loader:
    loss = (net(a) - b).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
Outcome(accelerator.process_index, (round(loss.item(), 5), accelerator.mixed_precision, rate))
"""
_OUTCOME = r"Outcome\(rank=\d, loss=\([^()]*\)\)"  # two ranks may write on one line, under torchrun


@pytest.fixture(scope="module")
def folder(notebook: kernels.Kernel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """The folder in which the notebook is, after its first cells."""
    made, before = tmp_path_factory.mktemp("notebook"), notebook.value("os.getcwd()")
    notebook.run(f"os.chdir({str(made)!r})")
    for cell in _CELLS.strip().split("\n---\n"):
        ran = notebook.run(cell)
        assert ran.status == "ok", ran.traceback
    yield made
    notebook.run(f"os.chdir({before})")


# Takes over 3 s: the script trains in a process of its own, which imports torch.
@pytest.mark.front_end
@pytest.mark.parametrize(
    ("ranks", "command"),
    [
        pytest.param(1, [], id="python"),
        pytest.param(
            2, ["-m", "torch.distributed.run", "--nproc_per_node", "2"], id="torchrun", marks=pytest.mark.slow
        ),
    ],
)
def test_script_comes_to_what_the_cell_comes_to(
    notebook: kernels.Kernel, folder: pathlib.Path, tmp_path: pathlib.Path, ranks: int, command: list[str]
) -> None:
    cell = notebook.run(f"%%distributed -n {ranks} --mixed_precision bf16\n{_CELL}", 100)
    outcomes = re.findall(_OUTCOME, cell.result)
    assert len(outcomes) == ranks, cell.traceback
    flags = f"-n {ranks} --mixed_precision bf16 --pull model --overwrite"
    exported = notebook.run(f"%%distributed --export train.py {flags}\n{_CELL}")
    assert "Written: train.py, and train_data.pt (" in exported.stdout, exported.traceback
    assert "does without --pull" in exported.stdout and "Launching" not in exported.stdout
    words = [sys.executable, *command, str(folder / "train.py")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(_OUTCOME, done.stdout)) == outcomes


@pytest.mark.usefixtures("folder")
def test_what_cannot_be_exported_is_named(notebook: kernels.Kernel) -> None:
    for flags, cell, said in (
        ("--overwrite", "1", "--overwrite goes with --export"),
        ("--export refused.py", "x = 1\n%time x", "line 3: %time is IPython's"),
    ):
        outcome = notebook.run(f"%%distributed {flags}\n{cell}")
        assert outcome.status == "error" and said in outcome.traceback + outcome.stderr
        assert len(outcome.traceback.splitlines()) <= 4
    assert notebook.value("[name for name in os.listdir() if 'refused' in name]") == "[]"
