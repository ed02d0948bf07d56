"""Tests of the note which cell initialised CUDA. On a CPU they run torch's queue in torch's place."""

from __future__ import annotations

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


WATCHING = "[type(f).__name__ for f in __import__('sys').meta_path].count('CudaWatch')"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kernels.Kernel]:
    with kernels.running(tmp_path_factory.mktemp("kernel")) as running:
        yield running


def test_unloading_takes_the_watch_away(kernel: kernels.Kernel) -> None:
    assert kernel.run("%load_ext notebook_accel").status == "ok"
    assert kernel.value(WATCHING) == "1"
    assert kernel.run("%unload_ext notebook_accel").status == "ok"
    assert kernel.value(WATCHING) == "0"
    registered = "[f.__qualname__ for f in get_ipython().events.callbacks['post_run_cell']]"
    assert "CudaWatch" not in kernel.value(registered)


# The last one: torch is there from then on.
def test_extension_leaves_the_imports_when_torch_is_there_and_knows_the_line(kernel: kernels.Kernel) -> None:
    assert kernel.run("%load_ext notebook_accel").status == "ok"
    assert kernel.value(WATCHING) == "1"
    assert kernel.value("'torch' in __import__('sys').modules") == "False"
    number = kernel.value("len(In)")  # of the next cell
    outcome = kernel.run(f"import torch\n{INITIALISING}\ndef on_gpu():\n    initialise()\n\non_gpu()")
    assert outcome.status == "ok", outcome.traceback
    assert kernel.value(WATCHING) == "0"
    assert kernel.value(NOTED) == f"'In[{number}], line 6'"
    kernel.run("initialise()")
    assert kernel.value(NOTED) == f"'In[{number}], line 6'"
