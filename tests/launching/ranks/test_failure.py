"""Tracebacks of ranks: the user's lines, and of a library no more than a count of its lines between them."""

from __future__ import annotations

import re
import traceback

import pytest

from notebook_accel.launching.ranks import failure
from tests import kernels

CELL = """\
%%distributed -n 1
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        {line}
for batch in DataLoader(Numbers(), batch_size=2, num_workers={workers}):
    pass
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_librarys_lines_between_the_users_are_counted(notebook: kernels.Kernel, workers: int) -> None:
    outcome = notebook.run(CELL.format(line="raise ValueError('no such number')", workers=workers))
    shown = re.sub(r"In\[\d+\]", "In", outcome.error_value)
    assert shown.startswith("rank 0 of 1 failed at In, line 7: ValueError: no such number")
    pattern = (
        r'File "In", line 8, in <module>\n.*\n(?: *\^+\n)?  \[\d+ lines of torch\]\n  File "In", line 7, in __getitem__'
    )
    assert re.search(pattern, shown), shown
    assert "site-packages" not in shown
    assert ("It was raised in DataLoader worker process 0." in shown) == (workers > 0)


def test_error_of_a_worker_keeps_its_causes_and_its_class(notebook: kernels.Kernel) -> None:
    """torch makes a RuntimeError of an exception whose class takes two arguments."""
    cell = """%%distributed -n 1
from torch.utils.data import DataLoader, Dataset
class OddError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
class Numbers(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        try:
            {}["image"]
        except KeyError:
            raise OddError(1, 2)
next(iter(DataLoader(Numbers(), num_workers=1)))
"""
    shown = re.sub(r"In\[\d+\]", "In", notebook.run(cell).error_value)
    assert re.match(r"rank 0 of 1 failed at In, line 13: RuntimeError: \S*OddError: 1 and 2\n", shown), shown
    assert "KeyError: 'image'" in shown
    assert re.search(r'File "In", line 11, in __getitem__', shown), shown


def test_variable_that_a_rank_cannot_rebuild_is_named(notebook: kernels.Kernel) -> None:
    notebook.run("""import os, pickle
class Picky:
    def __getstate__(self): return {"x": 1}
    def __setstate__(self, state):
        if "RANK" in os.environ: raise ValueError("not here")
fine, held = [1], {"deep": Picky()}
def uses(): return held
def load(): return pickle.loads(written)
class Sample: pass
written = pickle.dumps(Sample())""")
    said = notebook.run("%%distributed -n 2\nlen(fine + list(held))").error_value
    assert ' failed at the rebuilding of global "held"' in said and ": ValueError: not here\n" in said, said
    assert "Fix: make it inside the cell" in said and "in __setstate__" in said
    said = notebook.run(
        "from notebook_accel import notebook_launcher\nnotebook_launcher(uses, num_processes=1)"
    ).error_value
    assert ' failed at the rebuilding of function "uses"' in said, said
    said = notebook.run("notebook_launcher(load, num_processes=1)").error_value
    assert "Fix: the notebook has 'Sample'" in said and "--push Sample, or a line with Sample in the code" in said, said
    assert notebook.run("%%distributed -n 1 --push Sample\ntype(load()) is Sample").result == "[True]"


def test_librarys_lines_below_the_users_stay(notebook: kernels.Kernel) -> None:
    shown = notebook.run(CELL.format(line="import json; return json.loads('{')", workers=0)).error_value
    assert "lines of torch]" in shown
    assert "json/decoder.py" in shown


def test_traceback_without_a_call_back_is_whole(notebook: kernels.Kernel) -> None:
    odd = "import os; os.environ['NOTEBOOK_ACCEL_DEBUG'] = 'maybe'"  # which no launch would accept
    shown = notebook.run(f"%%distributed -n 1\n{odd}; import torch\ntorch.zeros(2) + torch.zeros(3)").error_value
    assert "lines of" not in shown
    assert re.search(r'File "In\[\d+\]", line 3, in <module>', shown)


def test_debugging_shows_all_lines(notebook: kernels.Kernel) -> None:
    notebook.run("os.environ['NOTEBOOK_ACCEL_DEBUG'] = '1'")
    try:
        shown = notebook.run(CELL.format(line="raise ValueError('no such number')", workers=0)).error_value
    finally:
        notebook.run("del os.environ['NOTEBOOK_ACCEL_DEBUG']")
    assert "torch/utils/data/dataloader.py" in shown


class _BrokenError(Exception):
    def __bool__(self) -> bool:
        raise SystemExit


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError, _BrokenError])
def test_exception_that_can_be_read_keeps_its_class_text_and_place(kind: type[BaseException]) -> None:
    """Also if the exception before it can't be read."""
    with pytest.raises(kind) as caught:
        raise kind("the text") from _BrokenError()
    read = failure.readable(caught.value)
    assert isinstance(read, kind) or kind is _BrokenError
    assert (type(read).__name__, str(read)) == (kind.__name__, "the text")
    shown = "".join(traceback.format_exception(type(read), read, read.__traceback__))
    assert 'raise kind("the text")' in shown
