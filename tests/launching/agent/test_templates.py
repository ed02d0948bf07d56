"""The processes that are kept ready: when they are started, replaced and let go."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from notebook_accel.launching.processes import bootstrap
from tests import kernels, processes
from tests.launches import FIRST_LAUNCH_S

WHO = "%%distributed -n 1 --view none\nimport os\nos.getppid()"


def template_of(kernel: kernels.Kernel) -> processes.Process:
    [agent] = processes.children(kernel.pid)
    [template] = processes.children(agent.pid)
    return template


def parent_of_ranks(kernel: kernels.Kernel, options: str = "") -> int:
    outcome = kernel.run(WHO.replace("%%distributed", f"%%distributed {options}"), FIRST_LAUNCH_S)
    assert outcome.status == "ok", outcome.traceback
    return int(outcome.result.strip("[]"))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a package that says which process imported it, and a module that leaves a thread."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "heavy").mkdir()
    (folder / "heavy" / "__init__.py").write_text("import os\nPID, VALUE = os.getpid(), 1\n")
    (folder / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n"
    )
    # pyarrow, which transformers and scikit-learn import where it is installed, brings such a thread.
    (folder / "with_jemalloc.py").write_text("""
import ctypes, threading
def live(named):
    ctypes.CDLL(None).prctl(15, b"jemalloc_bg_thd", 0, 0, 0)  # PR_SET_NAME of linux/prctl.h
    named.set()
    threading.Event().wait()
named = threading.Event()
threading.Thread(target=live, args=(named,), daemon=True).start()
named.wait()
""")
    # As with torch for CUDA, whose `torch.cuda.is_available()` does this (torch/csrc/cuda/Module.cpp, `poison_fork`).
    (folder / "wakes_cuda.py").write_text("""
import os, torch
is_in_bad_fork = False
def poison():
    global is_in_bad_fork
    is_in_bad_fork = True
os.register_at_fork(after_in_child=poison)
torch._C._cuda_isInBadFork = lambda: is_in_bad_fork
torch.cuda.device_count = lambda: 1
asked_nvml = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
assert asked_nvml == "1", asked_nvml
""")
    return folder


@pytest.fixture(scope="module")
def kernel(package: pathlib.Path) -> Iterator[kernels.Kernel]:
    """A kernel in that folder, for tests that replace its template."""
    with kernels.running(package) as running:
        loaded = running.run("%load_ext notebook_accel", FIRST_LAUNCH_S)
        assert loaded.status == "ok", loaded.traceback
        assert parent_of_ranks(running) > 0
        yield running


def test_import_of_the_launcher_warms_a_kernel_and_no_other_import_does(tmp_path: pathlib.Path) -> None:
    with kernels.running(tmp_path) as kernel:
        imported = kernel.run("""import importlib, sys, notebook_accel
for name in ("launcher", "notebook_launcher", "local"):
    importlib.import_module(f"notebook_accel.launching.kernel.{name}")
import notebook_accel.sessions.kernel.session, notebook_accel.cli, kernel_ext.magics, kernel_ext.panel
notebook_accel.Session, notebook_accel.Job
'torch' in sys.modules""")
        assert imported.result == "False", imported
        assert kernel.descendants() == []
        assert kernel.run("from notebook_accel import notebook_launcher; 'torch' in sys.modules").result == "False"
        processes.wait_until(lambda: len(kernel.descendants()) == 2, "agent and template are there")
        template = template_of(kernel)
        assert parent_of_ranks_by_function(kernel) == template.pid


def parent_of_ranks_by_function(kernel: kernels.Kernel) -> int:
    code = "import os\nlist(notebook_launcher(os.getppid, num_processes=1, view='none'))"
    return int(kernel.run(code, FIRST_LAUNCH_S).result.strip("[]"))


def test_modules_in_the_working_directory_are_not_ours(tmp_path: pathlib.Path) -> None:
    for name in ("json", "importlib", "random", "selectors", "signal"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is the one of the user')\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "probe.py").write_text(
        "import json, sys\ndef main(*args):\n    print(json.dumps([args, sys.path]))\n"
    )
    path = [*(entry for entry in sys.path if entry), "", str(tmp_path / "elsewhere"), "with, [a comma] and 'quotes'"]
    command = bootstrap("probe", "3", "two words", sys_path=path)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "" and json.loads(done.stdout) == [["3", "two words"], path]


def test_import_of_the_launcher_starts_nothing_in_a_script() -> None:
    code = (
        "import json, os; import IPython; from notebook_accel.launching.kernel import launcher;"
        "print(json.dumps(open(f'/proc/self/task/{os.getpid()}/children').read()))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert json.loads(done.stdout) == ""


def test_template_has_one_thread_no_device_and_all_that_an_optimizer_needs(notebook: kernels.Kernel) -> None:
    seen = notebook.run("%%distributed -n 1\nimport sys, os\n'torch.distributed' in sys.modules, os.getppid()").result
    assert "True" in seen
    template = template_of(notebook)
    threads = pathlib.Path(f"/proc/{template.pid}/task")
    # What is slow to import comes when nobody waits; a rank finds it when it is there.
    imported = "%%distributed -n 1 --view none\nimport sys\n'torch._dynamo' in sys.modules"
    processes.wait_until(lambda: notebook.run(imported).result == "[True]", "it has imported that", 90, poll_s=1.0)
    assert len(list(threads.iterdir())) == 1
    maps = pathlib.Path(f"/proc/{template.pid}/maps").read_text()
    assert "/dev/nvidia" not in maps and "/dev/accel" not in maps


def test_preloaded_module_is_imported_once_by_the_template(kernel: kernels.Kernel, package: pathlib.Path) -> None:
    cell = "%%distributed -n 2 --preload heavy\nimport os, heavy\n(heavy.VALUE, heavy.PID == os.getppid())"
    assert kernel.run(cell, FIRST_LAUNCH_S).result == "[(1, True), (1, True)]"
    before = parent_of_ranks(kernel, "--preload heavy")
    assert parent_of_ranks(kernel) == before  # more than asked for is as good
    (package / "heavy" / "__init__.py").unlink()  # as installing it again does
    (package / "heavy" / "__init__.py").write_text("import os\nPID, VALUE = os.getpid(), 2  # the new one\n")
    assert kernel.run(cell, FIRST_LAUNCH_S).result == "[(2, True), (2, True)]"
    assert parent_of_ranks(kernel) != before


def test_module_whose_thread_no_fork_needs_can_be_preloaded(kernel: kernels.Kernel) -> None:
    cell = "%%distributed -n 2 --preload with_jemalloc\nimport sys\n'with_jemalloc' in sys.modules"
    assert kernel.run(cell, FIRST_LAUNCH_S).result == "[True, True]"


@pytest.mark.timeout(240)
def test_modules_that_cannot_be_preloaded_are_refused_with_the_reason(kernel: kernels.Kernel) -> None:
    for name, reason in (
        ("threaded", "importing threaded leaves 1 thread running"),
        ("wakes_cuda", "importing wakes_cuda wakes CUDA's driver"),  # in place of torch's answers: there is no GPU
    ):
        outcome = kernel.run(f"%%distributed -n 1 --preload {name}\n1", FIRST_LAUNCH_S)
        assert outcome.error_name == "ProcessStartError"
        assert reason in outcome.traceback and "leave it out of preload" in outcome.traceback
    assert kernel.run("%%distributed -n 1\n'works'", FIRST_LAUNCH_S).result == "['works']"


def test_rank_has_no_variable_of_its_templates(kernel: kernels.Kernel) -> None:
    cell = "%%distributed -n 1\nimport os\n'PYTORCH_NVML_BASED_CUDA_CHECK' in os.environ"
    assert kernel.run(cell, FIRST_LAUNCH_S).result == "[False]"


def test_killed_template_that_nobody_uses_is_replaced(kernel: kernels.Kernel) -> None:
    before = parent_of_ranks(kernel)
    os.kill(before, signal.SIGKILL)
    processes.wait_until(lambda: before not in {p.pid for p in kernel.descendants()}, "it is gone")
    assert parent_of_ranks(kernel) != before


def test_run_whose_template_dies_before_its_ranks_run_starts_again(
    kernel: kernels.Kernel, tmp_path: pathlib.Path
) -> None:
    before = template_of(kernel)
    cell = kernel.start(f"""%%distributed -n 2 --log_dir {tmp_path}
import os
os.getppid(), int(os.environ["RANK"])""")

    def is_ordered() -> bool:  # its agent opens a rank's log when it orders the rank
        os.kill(before.pid, signal.SIGSTOP)  # again and again, since the agent lets it go on
        return len(list(tmp_path.rglob("rank_1.log"))) > 0

    processes.wait_until(is_ordered, "the ranks are ordered", poll_s=0)
    os.kill(before.pid, signal.SIGKILL)
    outcome = cell.finish(FIRST_LAUNCH_S)
    assert outcome.status == "ok", outcome.traceback
    assert outcome.result == str([(template_of(kernel).pid, rank) for rank in (0, 1)])


_DYING = """
import os, signal, subprocess, sys
from notebook_accel.protocol.channel import Connection
from notebook_accel.launching.template import template

kill_group = template.kill_group

def kill_group_disturbed(pid):
    os.kill(os.getpid(), signal.SIGTERM)
    kill_group(pid)

template.kill_group = kill_group_disturbed
template.come_under(os.getppid())
agent, ours = Connection.pair()
made = template.Template(ours)
for rank in range(2):
    started = subprocess.Popen(["sleep", "300"], start_new_session=True)
    made._ranks[os.pidfd_open(started.pid)] = ("job", rank, started.pid)
    print(started.pid, flush=True)
agent.close()
made.serve()
"""


def test_signal_that_follows_the_agents_end_does_not_keep_a_template_from_ending_its_ranks() -> None:
    ended = subprocess.run([sys.executable, "-c", _DYING], capture_output=True, text=True, timeout=60, check=False)
    ranks = [processes.read(int(pid)) for pid in ended.stdout.split()]
    assert len(ranks) == 2, ended.stderr
    processes.wait_until(lambda: not any(rank is not None and rank.is_alive for rank in ranks), "both ranks have ended")


_PAUSING = """
import sys, threading
from notebook_accel.launching.template import template
from notebook_accel.protocol.channel import Connection

template._PAUSE_S = float(sys.argv[1])
agent, ours = Connection.pair()

class Recorded(template.Template):
    def _fork(self, message):
        print("order", flush=True)
        agent.close()

def launch():
    said = agent.receive()  # the template is ready
    if template._PAUSE_S:
        agent.send(b"a launch")
        return
    while len(said) < 2:  # and ready again, when it has done the optional work
        said += agent.receive()
    agent.close()

threading.Thread(target=launch).start()
Recorded(ours, later=(print("step", flush=True) for _ in range(2))).serve()
"""


@pytest.mark.parametrize(("pause_s", "done"), [(60, ["order"]), (0, ["step", "step"])])
def test_launch_right_after_the_start_comes_before_optional_work(pause_s: float, done: list[str]) -> None:
    command = [sys.executable, "-c", _PAUSING, str(pause_s)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout.split() == done, ended.stderr
