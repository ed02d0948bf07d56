"""Tests of the note which cell initialised CUDA. On a CPU they run torch's queue in torch's place."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest

from tests import kernels

# Calls what torch calls while it initialises CUDA (torch/cuda/__init__.py, `_lazy_init`).
INITIALISING = """
def initialise():
    for call, _ in list(torch.cuda._queued_calls):
        if getattr(call, "__self__", None).__class__.__name__ == "CudaWatch":
            call()
"""
NOTED = "__import__('notebook_accel.launching.device_state').launching.device_state._cuda_origin"


@pytest.fixture
def kernel(tmp_path: pathlib.Path) -> Iterator[kernels.Kernel]:
    with kernels.running(tmp_path) as running:
        assert running.run("%load_ext notebook_accel").status == "ok"
        yield running


def test_extension_leaves_the_imports_when_torch_is_there(kernel: kernels.Kernel) -> None:
    watching = "[type(f).__name__ for f in __import__('sys').meta_path].count('CudaWatch')"
    assert kernel.value(watching) == "1"
    assert kernel.value("'torch' in __import__('sys').modules") == "False"
    assert kernel.run("import torch").status == "ok"
    assert kernel.value(watching) == "0"


def test_line_is_known_also_in_the_cell_that_imports_torch(kernel: kernels.Kernel) -> None:
    outcome = kernel.run(f"import torch\n{INITIALISING}\ndef on_gpu():\n    initialise()\n\non_gpu()")
    assert outcome.status == "ok", outcome.traceback
    assert kernel.value(NOTED) == "'In[2], line 6'"
    kernel.run("initialise()")
    assert kernel.value(NOTED) == "'In[2], line 6'"


def test_unloading_takes_the_watch_away(kernel: kernels.Kernel) -> None:
    assert kernel.run("%unload_ext notebook_accel").status == "ok"
    assert kernel.value("[type(f).__name__ for f in __import__('sys').meta_path].count('CudaWatch')") == "0"
    registered = "[f.__qualname__ for f in get_ipython().events.callbacks['post_run_cell']]"
    assert "CudaWatch" not in kernel.value(registered)
