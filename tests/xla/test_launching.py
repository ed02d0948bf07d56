"""Launches on an XLA device, from a real kernel."""

from __future__ import annotations

import pathlib
import re

import nbformat
import pytest

from tests import kernels

pytestmark = [pytest.mark.xla, pytest.mark.timeout(300)]
_CELL_S = 200.0

_MODEL = """
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
x, y = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
loader = DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
kernel_pid = os.getpid()
"""
_EPOCHS = """
for epoch in range(5):
    for a, b in loader:
        loss = torch.nn.functional.cross_entropy(net(a), b)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        report(loss=loss)
"""
_TRAINING = f"""%%distributed --pull model,optimizer
from notebook_accel import Accelerator, report
from notebook_accel.training.backends import xla
accelerator = Accelerator()
net, optimizer, loader = accelerator.prepare(model, optimizer, loader)
counts = []
{_EPOCHS}        counts.append(xla.compiled_count())
accelerator.print("on", accelerator.device)
model = accelerator.unwrap_model(net)
(os.environ["PJRT_DEVICE"], len(counts), counts[5] == counts[-1], os.getppid() != kernel_pid)
"""


def ok(outcome: kernels.Outcome) -> kernels.Outcome:
    assert outcome.status == "ok", outcome.traceback
    return outcome


def test_forked_rank_trains_the_digits(notebook: kernels.Kernel) -> None:
    ok(notebook.run(_MODEL, _CELL_S))
    outcome = ok(notebook.run(_TRAINING, _CELL_S))
    assert outcome.result == "[('CPU', 280, True, True)]"
    assert "Launching training on 1 XLA CPU" in outcome.stdout
    assert "on xla:0" in outcome.stdout
    # The metric of the last step, read when the device had computed it.
    [loss] = re.findall(r"epoch 5  step 56/56 .*loss (\d\.\d+)", outcome.stdout)
    assert float(loss) < 0.5
    accuracy = notebook.run("float((model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean())").result
    assert float(accuracy) > 0.95
    # What came back lies on the host, and its optimizer still moves it.
    assert notebook.run("{p.device.type for p in model.parameters()}").result == "{'cpu'}"
    moved = "all(a is b for a, b in zip(optimizer.param_groups[0]['params'], model.parameters()))"
    assert notebook.run(moved).result == "True"
    assert notebook.run("'torch_xla' in __import__('sys').modules").result == "False"


def test_two_forked_ranks_train_one_model_on_a_device_each(notebook: kernels.Kernel) -> None:
    ok(notebook.run(_MODEL, _CELL_S))
    outcome = ok(
        notebook.run(
            f"""%%distributed -n 2 --pull model
from notebook_accel import Accelerator, report
accelerator = Accelerator()
net, optimizer, loader = accelerator.prepare(model, optimizer, loader)
{_EPOCHS}
print("done on", accelerator.device)
model = accelerator.unwrap_model(net)
(accelerator.process_index, len(loader), accelerator.gather(model[0].weight.detach().sum()).unique().numel())""",
            _CELL_S,
        )
    )
    assert outcome.result == "[(0, 28, 1), (1, 28, 1)]"  # half of the batches each, and the same weights
    assert "Launching training on 2 XLA CPUs" in outcome.stdout
    for rank in range(2):
        assert f"{rank} │ done on xla:0" in kernels.unfolded(outcome.stdout)
        assert re.search(rf"rank {rank}  finished  epoch 5  step 28/28 .*loss \d\.\d+", outcome.stdout)
    accuracy = notebook.run("float((model(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean())").result
    assert float(accuracy) > 0.9


def test_first_failing_rank_and_an_interrupt(notebook: kernels.Kernel) -> None:
    beginning = """%%distributed -n 2
from notebook_accel import Accelerator
accelerator = Accelerator()
total = accelerator.reduce(torch.ones(1, device=accelerator.device))
"""
    outcome = notebook.run(
        beginning + "if accelerator.process_index == 1: raise ValueError(f'no: {total.item()}')", 200
    )
    assert outcome.error_name == "RankFailedError"
    assert "rank 1 of 2" in outcome.traceback and "ValueError: no: 2.0" in outcome.traceback
    cell = notebook.start(
        beginning + "print('waits', flush=True)\nif accelerator.process_index == 0: accelerator.reduce(total)\n"
        "import time; time.sleep(250)"
    )
    for rank in range(2):
        cell.wait_for_output(f"{rank} │ waits", _CELL_S)
    notebook.interrupt()
    assert cell.finish().error_name == "KeyboardInterrupt"
    assert ok(notebook.run("%%distributed -n 2\nint(os.environ['RANK'])", _CELL_S)).result == "[0, 1]"


def test_example_notebook_trains_on_two_devices(notebook: kernels.Kernel) -> None:
    path = pathlib.Path(__file__).parents[2] / "example_notebooks" / "04_tpu.ipynb"
    sources = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    ok(notebook.run("os.environ['CPU_NUM_DEVICES'] = '2'"))
    *_, training, test = [ok(notebook.run(source, _CELL_S)) for source in sources]
    ok(notebook.run("del os.environ['CPU_NUM_DEVICES']"))
    assert "trained on 2 x xla" in training.stdout
    accuracy = re.fullmatch(r"test accuracy: (\d+\.\d) %\n", test.stdout)
    assert accuracy is not None, test.stdout
    assert float(accuracy[1]) >= 95


def test_half_precision_comes_from_the_launch(notebook: kernels.Kernel) -> None:
    outcome = ok(
        notebook.run(
            """%%distributed --mixed_precision bf16
from notebook_accel import Accelerator
device = Accelerator().device
import torch_xla
torch_xla._XLAC._get_xla_tensors_text([torch.ones(1).to(device) + 1]).count("bf16[1]") > 0""",
            _CELL_S,
        )
    )
    assert outcome.result == "[True]"


def test_spawned_rank_has_the_device_too(notebook: kernels.Kernel) -> None:
    cell = "%%distributed --start_method spawn\nfrom notebook_accel import Accelerator\nstr(Accelerator().device)"
    assert ok(notebook.run(cell, _CELL_S)).result == "['xla:0']"


def test_without_an_xla_device_ranks_are_on_the_cpu(notebook: kernels.Kernel) -> None:
    cell = "%%distributed -n 2 --use_cpu\nfrom notebook_accel import Accelerator\nstr(Accelerator().device)"
    assert ok(notebook.run(cell, _CELL_S)).result == "['cpu', 'cpu']"


def test_number_that_pjrt_cannot_give_is_refused_with_those_that_it_can(notebook: kernels.Kernel) -> None:
    pretend = "find, pjrt.find_platform = pjrt.find_platform, lambda: pjrt.Platform('TPU', 8)"
    ok(notebook.run(f"from notebook_accel.launching.kernel import pjrt\n{pretend}"))
    outcome = notebook.run("%%distributed -n 3\n1", _CELL_S)
    ok(notebook.run("pjrt.find_platform = find"))
    assert outcome.error_name == "PreflightError"
    assert "3 processes were asked for, and PJRT has 8 TPU devices." in outcome.error_value
    assert "--num_processes 1 or --num_processes 8; or --use_cpu" in outcome.error_value


def test_xla_that_is_initialised_in_the_kernel_is_refused_with_the_cell(notebook: kernels.Kernel) -> None:
    """The last one: the kernel can't fork any more."""
    ok(notebook.run("import torch_xla", _CELL_S))
    assert ok(notebook.run("%%distributed\n'imported is not initialised'", _CELL_S)).result
    ok(notebook.run("used = torch_xla.device()", _CELL_S))
    label = notebook.run("In.index('used = torch_xla.device()')").result
    outcome = notebook.run("%%distributed\n1", _CELL_S)
    assert outcome.error_name == "PreflightError"
    assert f"XLA is initialised in this kernel since In[{label}]" in outcome.error_value
    assert "restart the kernel" in outcome.error_value
