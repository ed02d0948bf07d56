"""Tests that need a machine with a GPU."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests import hostile, kernels, processes

LAUNCH_S = 180.0


def gpus() -> int:
    """Return how many GPUs the driver's own tool lists, independently of the code under test."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return listed.count("GPU ")


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(gpus() == 0, reason="NOT TESTED: no NVIDIA GPU on this machine"),
]


def used_mib() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout)


@pytest.fixture
def notebook(tmp_path: pathlib.Path) -> Iterator[kernels.Kernel]:
    with kernels.running(tmp_path) as kernel:
        loaded = kernel.run("%load_ext notebook_accel\nimport os, time, torch", LAUNCH_S)
        assert loaded.status == "ok", loaded.traceback
        yield kernel


TRAINING = """
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
"""

LOOP = """
from notebook_accel import Accelerator, report
accelerator = Accelerator()
# On all ranks together 64 samples, so that there are as many steps however many GPUs there are.
loader = DataLoader(data, batch_size=max(1, 64 // accelerator.num_processes), shuffle=True)
net, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(8):
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(net(x), y)
        accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()
        report(loss=loss)
model = accelerator.unwrap_model(net)
str(accelerator.device), str(x.device), accelerator.mixed_precision, [float(p.sum()) for p in model.parameters()]"""


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_cell_trains_on_the_gpu(notebook: kernels.Kernel, precision: str) -> None:
    notebook.run(TRAINING)
    cell = f"%%distributed --mixed_precision {precision} --pull model --out results{LOOP}"
    outcome = notebook.run(cell, LAUNCH_S)
    assert outcome.status == "ok", outcome.traceback
    assert f"Launching training on {gpus()} GPU" in outcome.stdout
    assert notebook.value("results[0][:3]") == f"('cuda:0', 'cuda:0', '{precision}')"
    accuracy = "(model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean().item() > 0.95"
    assert notebook.value(accuracy) == "True"
    assert notebook.value("str(next(model.parameters()).device), torch.cuda.is_initialized()") == "('cpu', False)"


def test_more_ranks_than_gpus_is_refused_with_their_number(notebook: kernels.Kernel) -> None:
    outcome = notebook.run(f"%%distributed -n {gpus() + 1}\n1", LAUNCH_S)
    assert outcome.error_name == "PreflightError"
    assert f"there {'is' if gpus() == 1 else 'are'} {gpus()} GPU" in outcome.traceback


def test_cpu_ranks_where_there_are_gpus(notebook: kernels.Kernel) -> None:
    outcome = notebook.run(
        """%%distributed -n 2 --use_cpu
from notebook_accel import Accelerator
accelerator = Accelerator()
str(accelerator.device), int(accelerator.reduce(torch.tensor(accelerator.process_index + 1)))""",
        LAUNCH_S,
    )
    assert outcome.result == "[('cpu', 3), ('cpu', 3)]", outcome.traceback


def test_cuda_in_use_in_the_kernel(notebook: kernels.Kernel) -> None:
    notebook.run("def use():\n    return torch.ones(64 << 20, device='cuda')", LAUNCH_S)
    notebook.run("held = use()\nmodels = {'a': [torch.nn.Linear(2, 2).cuda()]}", LAUNCH_S)
    refused = notebook.run("%%distributed\nheld.sum(), models", LAUNCH_S)
    assert refused.error_name == "PreflightError"
    assert "CUDA is in use in this kernel since In[2], line 2. It holds 2" in refused.traceback
    assert "MiB on GPU 0" in refused.traceback
    assert 'On the GPU, in this kernel\'s memory: global "held", global "models".' in refused.traceback
    allowed = notebook.run(
        "%%distributed --allow_initialized_cuda -n 1\nfloat(torch.ones(2, device='cuda').sum())", LAUNCH_S
    )
    assert allowed.result == "[2.0]", allowed.traceback
    assert "Warning: CUDA is in use in this kernel since In[2], line 2." in allowed.stderr
    named = notebook.run("%%distributed --allow_initialized_cuda\nheld.sum()", LAUNCH_S)
    assert named.error_name == "PreflightError"
    assert 'memory: global "held".' in named.traceback


def test_cuda_is_initialised_by_the_cell_that_imports_torch(tmp_path: pathlib.Path) -> None:
    with kernels.running(tmp_path) as kernel:
        kernel.run("%load_ext notebook_accel")
        kernel.run("import torch\n\nheld = torch.ones(3, device='cuda')", LAUNCH_S)
        refused = kernel.run("%%distributed\n1", LAUNCH_S)
        assert "CUDA is in use in this kernel since In[2], line 3." in refused.traceback


def test_ranks_share_gpus_when_asked(notebook: kernels.Kernel) -> None:
    notebook.run(TRAINING)
    ranks = gpus() + 1
    cell = f"%%distributed --oversubscribe -n {ranks} --pull model --out results{LOOP}"
    outcome = notebook.run(cell, LAUNCH_S)
    assert outcome.status == "ok", outcome.traceback
    assert f"Launching training on {gpus()} GPU{'' if gpus() == 1 else 's'} shared by {ranks} ranks." in outcome.stdout
    devices = [f"cuda:{rank % gpus()}" for rank in range(ranks)]
    assert notebook.value("[result[0] for result in results]") == str(devices)
    apart = "max(abs(a - b) for result in results for a, b in zip(result[3], results[0][3]))"
    assert float(notebook.value(apart)) < 1e-3  # their losses are of different batches, their weights are the same


def test_collectives_on_a_shared_gpu(notebook: kernels.Kernel) -> None:
    outcome = notebook.run(
        """%%distributed --oversubscribe -n 2
from notebook_accel import Accelerator
accelerator = Accelerator()
mine = torch.full((3,), accelerator.process_index + 1.0, device=accelerator.device)
accelerator.gather(mine).tolist(), accelerator.reduce(mine).tolist()""",
        LAUNCH_S,
    )
    assert outcome.result.count("[3.0, 3.0, 3.0]") == 2, outcome.traceback
    assert outcome.result.count("[1.0, 1.0, 1.0, 2.0, 2.0, 2.0]") == 2


def test_trial_run_uses_the_gpus(notebook: kernels.Kernel) -> None:
    notebook.run("%env NOTEBOOK_ACCEL_DEBUG=1")
    outcome = notebook.run("%%distributed\nimport os\nint(os.environ['LOCAL_RANK'])", LAUNCH_S)
    assert outcome.result == str(list(range(gpus()))), outcome.traceback
    assert outcome.stdout.startswith("The trial run went well")


def test_doctors_trial_goes_well(notebook: kernels.Kernel) -> None:
    outcome = notebook.run("%distributed doctor --trial", 4 * LAUNCH_S)
    assert "✓ fp16 step" in outcome.stdout and "✓ loader's copies" in outcome.stdout
    assert "✗" not in outcome.stdout, outcome.stdout


def test_everything_listens_on_loopback_only(notebook: kernels.Kernel, tmp_path: pathlib.Path) -> None:
    notebook.run(f"STOP = {str(tmp_path / 'stop')!r}")
    own = hostile.listeners(notebook.pid)
    cell = notebook.start("""%%distributed
from notebook_accel import Accelerator
accelerator = Accelerator()
accelerator.wait_for_everyone()
print("met", flush=True)
while not os.path.exists(STOP):
    time.sleep(0.05)""")
    cell.wait_for_output("met", LAUNCH_S)
    found = hostile.listeners(notebook.pid) - own
    (tmp_path / "stop").touch()
    assert cell.finish(LAUNCH_S).status == "ok"
    assert found
    assert {listener.address for listener in found} <= {"127.0.0.1", "::1"}


def test_results_come_back_on_the_cpu(notebook: kernels.Kernel) -> None:
    outcome = notebook.run("%%distributed -n 1 --out back\nt = torch.arange(4.0, device='cuda')\n(t, t[1:])", LAUNCH_S)
    assert outcome.status == "ok", outcome.traceback
    notebook.run("back[0][1][0] = 9")
    assert notebook.value("[t.tolist() for t in back[0]], torch.cuda.is_initialized()") == (
        "([[0.0, 9.0, 2.0, 3.0], [9.0, 2.0, 3.0]], False)"
    )


def test_device_memory_is_free_after_an_interrupt_and_a_kill(notebook: kernels.Kernel) -> None:
    before = used_mib()
    for by_interrupt in (True, False):
        cell = notebook.start("""%%distributed -n 1
held = torch.ones(1 << 30, device="cuda")
print(f"pid={os.getpid()}", flush=True)
time.sleep(120)""")
        cell.wait_for_output("pid=", LAUNCH_S)
        rank = int(cell.stream("stdout").rpartition("pid=")[2].split()[0])
        assert used_mib() > before + 4000
        notebook.interrupt() if by_interrupt else os.kill(rank, signal.SIGKILL)
        assert cell.finish(LAUNCH_S).status == "error"
        processes.wait_until(lambda: used_mib() < before + 200, "the device memory is free")


def test_device_out_of_memory_shows_what_every_rank_had(notebook: kernels.Kernel) -> None:
    outcome = notebook.run(
        """%%distributed -n 1
from notebook_accel import Accelerator
Accelerator()
held = torch.ones(1 << 30, device="cuda")
torch.empty(1 << 50, device="cuda")""",
        LAUNCH_S,
    )
    assert outcome.error_name == "RankFailedError"
    used = re.search(r"Memory in use then, rank 0: (\d+(?:\.\d)?) GiB of (\d+(?:\.\d)?) GiB\.", outcome.traceback)
    assert used is not None, outcome.traceback
    assert 4.0 <= float(used[1]) < float(used[2])
    assert "smaller batches" in outcome.traceback


def test_fork_after_torch_was_asked_for_gpus(notebook: kernels.Kernel) -> None:
    cell = "%%distributed --start_method fork -n 1\nfloat(torch.ones(2, device='cuda').sum())"
    notebook.run("%env PYTORCH_NVML_BASED_CUDA_CHECK=1")
    assert notebook.value("torch.cuda.is_available()") == "True"
    allowed = notebook.run(cell, LAUNCH_S)
    assert allowed.result == "[2.0]", allowed.traceback
    notebook.run("del os.environ['PYTORCH_NVML_BASED_CUDA_CHECK']")
    assert notebook.value("torch.cuda.is_available(), torch.cuda.is_initialized()") == "(True, False)"
    refused = notebook.run(cell, LAUNCH_S)
    assert refused.error_name == "PreflightError"
    assert "This kernel has woken CUDA's driver" in refused.traceback


def test_report_while_a_graph_is_captured(notebook: kernels.Kernel) -> None:
    outcome = notebook.run(
        """%%distributed -n 1
from notebook_accel import Accelerator, report
x = torch.ones(8, device=Accelerator().device)  # from here on the memory is asked for
report(loss=x.sum())
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x * 2
    report(loss=y.sum())
    time.sleep(2.5)  # two looks at the memory
graph.replay()
report(loss=y.sum())
float(y.sum())""",
        LAUNCH_S,
    )
    assert outcome.result == "[16.0]", outcome.traceback
    assert "loss 16" in outcome.stdout


def test_profile_has_the_kernels_of_the_device(notebook: kernels.Kernel) -> None:
    notebook.run(TRAINING)
    loop = LOOP.replace("range(8)", "range(1_000_000)")
    assert notebook.run(f"%%distributed -n 1 --background --out trained --view none{loop}", LAUNCH_S).status == "ok"
    notebook.run("while not all(rank.steps for rank in trained.ranks): time.sleep(0.05)", LAUNCH_S)
    outcome = notebook.run("profile = trained.profile(3)", LAUNCH_S)
    assert outcome.status == "ok", outcome.traceback
    assert notebook.value("[rank.steps for rank in profile.ranks]") == "[3]"
    assert notebook.value("len(profile.ranks[0].of_kind('kernel')) > 3, len(profile.costliest(kernels=True)) > 3") == (
        "(True, True)"
    )
    notebook.run("trained.kill(); trained.wait(60)")


@pytest.mark.skipif(gpus() < 2, reason="NOT TESTED: no two NVIDIA GPUs on this machine")
def test_failure_is_said_although_a_reported_number_never_comes(notebook: kernels.Kernel) -> None:
    outcome = notebook.run(
        """%%distributed -n 2
from notebook_accel import Accelerator, report
accelerator = Accelerator()
loss = accelerator.reduce(torch.ones(1, device=accelerator.device))
if accelerator.process_index == 0:
    torch.distributed.all_reduce(loss)
    report(loss=loss)
    time.sleep(1)  # in which it would be read
    raise LookupError("after the collective")
time.sleep(100)""",
        60,
    )
    assert outcome.error_name == "RankFailedError"
    assert "LookupError: after the collective" in outcome.traceback
