"""Tests of the note which cell initialised CUDA. On a CPU they run torch's queue in torch's place."""

from __future__ import annotations

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


def test_watch_leaves_the_imports_when_torch_is_there_or_it_is_unloaded_and_knows_the_line(
    kernel: kernels.Kernel,
) -> None:
    load = f"%load_ext notebook_accel\n{kernels.END_TEMPLATE}"
    assert kernel.run(load).status == "ok"
    assert kernel.value(WATCHING) == "1"
    assert kernel.run("%unload_ext notebook_accel").status == "ok"
    assert kernel.value(WATCHING) == "0"
    registered = "[f.__qualname__ for f in get_ipython().events.callbacks['post_run_cell']]"
    assert "CudaWatch" not in kernel.value(registered)
    assert kernel.run(load).status == "ok"
    assert kernel.value(WATCHING) == "1"
    assert kernel.value("'torch' in __import__('sys').modules") == "False"
    number = kernel.value("len(In)")  # of the next cell
    outcome = kernel.run(f"import torch\n{INITIALISING}\ndef on_gpu():\n    initialise()\n\non_gpu()")
    assert outcome.status == "ok", outcome.traceback
    assert kernel.value(WATCHING) == "0"
    assert kernel.value(NOTED) == f"'In[{number}], line 6'"
    kernel.run("initialise()")
    assert kernel.value(NOTED) == f"'In[{number}], line 6'"
