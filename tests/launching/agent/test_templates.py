"""The processes that are kept ready: when they are started, replaced and let go."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from notebook_accel.errors import ProcessStartError
from notebook_accel.launching.kernel import local
from notebook_accel.launching.kernel.job import Job
from notebook_accel.launching.processes import bootstrap
from tests import kernels, processes
from tests.launches import FIRST_LAUNCH_S
from tests.launching import functions


def parent_of_ranks(launch: Callable[..., Job], **options: Any) -> int:
    [pid] = launch(os.getppid, num_processes=1, **options).results(timeout_s=FIRST_LAUNCH_S)
    return int(pid)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pathlib.Path]:
    """A folder of modules on the path, among them a package that says which process imported it."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "heavy").mkdir()
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
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder
    local.engine().close()  # and the templates that have imported from there


@pytest.mark.slow
def test_import_of_the_launcher_warms_a_kernel_and_no_other_import_does(tmp_path: pathlib.Path) -> None:
    with kernels.running(tmp_path) as kernel:
        imported = kernel.run("""import importlib, os, sys, notebook_accel
for name in ("launcher", "notebook_launcher", "local"):
    importlib.import_module(f"notebook_accel.launching.kernel.{name}")
import notebook_accel.sessions.kernel.session, notebook_accel.cli, kernel_ext.magics, kernel_ext.panel
notebook_accel.Session, notebook_accel.Job
'torch' in sys.modules""")
        assert imported.result == "False", imported
        assert kernel.descendants() == []
        assert kernel.run("from notebook_accel import notebook_launcher; 'torch' in sys.modules").result == "False"
        processes.wait_until(lambda: len(kernel.descendants()) == 2, "agent and template are there")
        [agent] = processes.children(kernel.pid)
        [template] = processes.children(agent.pid)
        parents = kernel.run("list(notebook_launcher(os.getppid, num_processes=1, view='none'))", FIRST_LAUNCH_S)
        assert parents.result == f"[{template.pid}]"


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


def looks_around() -> tuple[list[str], bool]:
    return [*sys.modules], "PYTORCH_NVML_BASED_CUDA_CHECK" in os.environ


def test_template_has_one_thread_no_device_and_all_that_an_optimizer_needs(launch: Callable[..., Job]) -> None:
    def see() -> tuple[list[str], bool]:
        return launch(looks_around, num_processes=1).results(timeout_s=FIRST_LAUNCH_S)[0]

    modules, has_variable = see()
    assert "torch.distributed" in modules and not has_variable  # which is the template's own
    template = parent_of_ranks(launch)
    # What is slow to import comes when nobody waits; a rank finds it when it is there.
    processes.wait_until(lambda: "torch._dynamo" in see()[0], "it has imported that", 90, poll_s=0.5)
    assert len(os.listdir(f"/proc/{template}/task")) == 1
    maps = pathlib.Path(f"/proc/{template}/maps").read_text()
    assert "/dev/nvidia" not in maps and "/dev/accel" not in maps


def has_heavy() -> tuple[int, bool]:
    import heavy  # type: ignore[import-not-found]

    return heavy.VALUE, os.getppid() == heavy.PID


@pytest.mark.slow
def test_preloaded_module_is_imported_once_by_the_template(launch: Callable[..., Job], package: pathlib.Path) -> None:
    for value in (1, 2):
        # The second time, as installing it again does.
        (package / "heavy" / "__init__.py").unlink(missing_ok=True)
        (package / "heavy" / "__init__.py").write_text(
            f"import os\nPID, VALUE = os.getpid(), {value}  #{'x' * value}\n"
        )
        assert launch(has_heavy, preload=["heavy"]).results(timeout_s=FIRST_LAUNCH_S) == [(value, True)] * 2
        before = parent_of_ranks(launch, preload=["heavy"])
        assert parent_of_ranks(launch) == before  # more than asked for is as good


@pytest.mark.slow
@pytest.mark.usefixtures("package")
@pytest.mark.timeout(240)
def test_modules_that_cannot_be_preloaded_are_refused_with_the_reason(launch: Callable[..., Job]) -> None:
    for name, reason in (
        ("threaded", "importing threaded leaves 1 thread running"),
        ("wakes_cuda", "importing wakes_cuda wakes CUDA's driver"),  # in place of torch's answers: there is no GPU
    ):
        with pytest.raises(ProcessStartError, match=reason) as caught:
            launch(functions.rank, preload=[name]).results(timeout_s=FIRST_LAUNCH_S)
        assert "leave it out of preload" in str(caught.value)
    assert launch(functions.rank, preload=["with_jemalloc"]).results(timeout_s=FIRST_LAUNCH_S) == [0, 1]


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
