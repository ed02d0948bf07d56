"""Findings before a launch. Those that need a GPU are in tests/gpu."""

from __future__ import annotations

import os
import pathlib
import pwd
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator

import pytest
import torch

from notebook_accel import host_memory, notebook_launcher
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import PreflightError
from notebook_accel.launching import device_state
from notebook_accel.launching.kernel import devices, preflight
from tests import processes


def test_fp16_on_a_cpu_is_refused_with_the_reason() -> None:
    [finding] = preflight.check(LaunchConfig(mixed_precision="fp16", use_cpu=True))
    assert finding.refuses
    assert "CPU" in finding.what and "scaling" in finding.why and "bf16" in finding.fix


def test_nothing_speaks_against_many_ranks_on_the_cpu() -> None:
    assert preflight.check(LaunchConfig(num_processes=20, use_cpu=True)) == ()
    found = devices.Devices.find(LaunchConfig(use_cpu=True))
    assert (found.available, found.describe(1), found.describe(2)) == (1, "1 CPU", "2 CPUs")


def test_launch_in_a_rank_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    [finding] = preflight.check(LaunchConfig(use_cpu=True))
    assert (finding.what, finding.refuses) == ("This process is rank 1 of 2 already.", False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert preflight.check(LaunchConfig(use_cpu=True)) == ()


def test_variables_that_change_nothing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("NOTEBOOK_ACCEL_COMPAT", "Accelerate")
    monkeypatch.setenv("NOTEBOOK_ACCEL_DEBUG", "maybe")
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "tp")
    monkeypatch.setenv("NOTEBOOK_ACCEL_DEBUGGING", "1")
    monkeypatch.setenv("NOTEBOOK_ACCEL_NUM_PROCESES", "2")
    monkeypatch.setenv("NOTEBOOK_ACCEL_USE_PORT", "29501")
    found = {finding.what: finding for finding in preflight.check(LaunchConfig(use_cpu=True))}
    assert found.keys() == {
        "The environment variable NOTEBOOK_ACCEL_COMPAT is 'Accelerate'.",
        "The environment variable NOTEBOOK_ACCEL_DEBUG is 'maybe'.",
        "The environment variable ACCELERATE_USE_PARALLELISM_CONFIG is 'tp'.",
        "The environment variable NOTEBOOK_ACCEL_DEBUGGING has no effect.",
        "The environment variable NOTEBOOK_ACCEL_NUM_PROCESES has no effect.",
        "The environment variable NOTEBOOK_ACCEL_USE_PORT has no effect.",
        "The environment variable ACCELERATE_USE_DEEPSPEED asks for DeepSpeed, which isn't supported here.",
    }
    misspelt = found["The environment variable NOTEBOOK_ACCEL_NUM_PROCESES has no effect."]
    assert misspelt.fix.startswith("is it NOTEBOOK_ACCEL_NUM_PROCESSES?")
    named_elsewhere = found["The environment variable NOTEBOOK_ACCEL_USE_PORT has no effect."]
    assert named_elsewhere.fix.startswith("is it NOTEBOOK_ACCEL_MAIN_PROCESS_PORT?")
    assert {finding.what for finding in found.values() if not finding.refuses} == {
        *(misspelt.what, named_elsewhere.what),
        "The environment variable NOTEBOOK_ACCEL_DEBUGGING has no effect.",
    }


@pytest.mark.parametrize("listed", ["", "-1,0"])
def test_no_gpu_is_visible_where_none_is_named(monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert devices.visible_gpus() == 0


def test_more_ranks_than_gpus_names_how_many_there_are() -> None:
    one, two = devices.Devices("GPU", 1), devices.Devices("GPU", 2)
    [finding] = preflight.check(LaunchConfig(num_processes=3), one)
    assert finding.refuses
    assert "3 processes were asked for, and there is 1 GPU." in finding.what
    assert "--oversubscribe" in finding.fix
    assert preflight.check(LaunchConfig(num_processes=2), two) == ()
    assert preflight.check(LaunchConfig(), two) == ()
    assert preflight.check(LaunchConfig(num_processes=3, oversubscribe=True), one) == ()
    assert one.describe(3) == "1 GPU shared by 3 ranks"
    assert two.describe(2) == "2 GPUs"


def test_options_of_a_cluster_without_one_are_refused() -> None:
    [finding] = preflight.check(LaunchConfig(use_cpu=True, engine_options=("strategy=SPREAD", "nodes=2")))
    assert finding.refuses
    assert finding.what == "engine_options='strategy=SPREAD, nodes=2' would do nothing."
    assert "--engine ray" in finding.fix


def test_a_mesh_has_as_many_ranks_as_the_launch() -> None:
    mesh = LaunchConfig(use_cpu=True, parallelism_config_dp_shard_size=2, parallelism_config_tp_size=2)
    [finding] = preflight.check(mesh.replace(num_processes=2))
    assert finding.refuses
    sizes = "parallelism_config_dp_shard_size=2, parallelism_config_tp_size=2"
    assert finding.what == f"The mesh ({sizes}) has 4 ranks, and the launch has 2."
    assert preflight.check(mesh.replace(num_processes=4)) == ()
    assert preflight.check(mesh.replace(num_processes=2, num_nodes=2)) == ()


def test_port_in_use_is_said_with_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        [finding] = preflight.check(LaunchConfig(main_process_port=port, use_cpu=True))
        assert finding.refuses
        assert finding.what == f"The port {port} for the ranks' store can't be used: Address already in use."
        assert finding.why.startswith(f"Process {os.getpid()} (")
        assert "leave out main_process_port" in finding.fix
    assert preflight.check(LaunchConfig(main_process_port=port, use_cpu=True)) == ()


def test_all_findings_come_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(PreflightError) as caught:
        notebook_launcher(print, (), 2, "fp16", server.getsockname()[1], use_cpu=True)
    assert len(caught.value.findings) == 2
    assert "fp16" in str(caught.value) and "The port" in str(caught.value)


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        host_memory, "available_bytes", lambda: 100 << 20
    )  # the machine's own can't be used up in a test
    [finding] = preflight.check(LaunchConfig(num_processes=2, use_cpu=True))
    assert finding.what == "There is too little memory for 2 processes: 100 MiB are available."
    assert preflight.check(LaunchConfig(num_processes=1, use_cpu=True)) == ()


def test_little_shared_memory_is_a_warning_that_is_printed_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "_SHARED_MEMORY", str(tmp_path / "missing"))
    findings = preflight.check(LaunchConfig(num_processes=2, use_cpu=True))
    assert [finding.refuses for finding in findings] == [False]
    preflight.warn(findings)
    preflight.warn(findings)
    assert capsys.readouterr().err.count("Warning: ") == 1
    assert "--shm-size" in findings[0].fix


@pytest.mark.slow
def test_accelerator_and_libraries_matter_only_to_forks() -> None:
    code = """
import sys, types
from accelerate import Accelerator
Accelerator(cpu=True)
sys.modules["bitsandbytes"] = types.ModuleType("bitsandbytes")  # not installed here
from notebook_accel.config import LaunchConfig
from notebook_accel.launching.kernel import preflight
assert not [each for each in preflight.check(LaunchConfig(num_processes=2, use_cpu=True)) if "ccelerat" in each.what]
for finding in preflight.check_fork(): print(finding.refuses, finding.what)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert run.stdout.splitlines() == [
        "True There is an Accelerator of the accelerate library in this kernel.",
        "False This kernel has imported bitsandbytes.",
    ], run.stderr


def test_group_of_the_kernel_matters_to_forks(tmp_path: pathlib.Path) -> None:
    said = "The kernel itself is in a process group of torch.distributed."
    assert said not in [finding.what for finding in preflight.check_fork()]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert [finding.refuses for finding in preflight.check_fork() if finding.what == said] == [True]
    finally:
        torch.distributed.destroy_process_group()


def test_launch_after_the_first_opens_and_imports_next_to_nothing() -> None:
    code = """
import sys
from notebook_accel.config import LaunchConfig
from notebook_accel.launching.kernel import preflight
config = LaunchConfig(num_processes=2)
preflight.check(config)
done = []
sys.addaudithook(lambda event, args: done.append(f"{event} {args[0]}"))
preflight.check(config)
seen = [entry for entry in done if entry.startswith(("open", "import", "subprocess", "ctypes", "socket", "os."))]
print(*(entry for entry in seen if not entry.startswith("open /sys/fs/cgroup")), sep="\\n")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.splitlines() == ["open /proc/meminfo", "open /proc/self/cgroup"]


# Start method fork --------------------------------------------------------------------------------------------------

_FORK = LaunchConfig(num_processes=2, use_cpu=True, start_method="fork")


def test_nothing_speaks_against_a_fork_of_this_process() -> None:
    assert preflight.check(_FORK) == ()


def test_initialised_cuda_is_refused_whatever_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The real flag, without the GPU that would set it.
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: torch.cuda._initialized)
    [finding] = preflight.check(_FORK.replace(allow_initialized_cuda=True))
    assert finding.refuses
    assert "CUDA is initialised" in finding.what and "--start_method spawn" in finding.fix


@pytest.fixture
def woken(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """torch as ``torch.cuda.is_available()`` leaves it on a machine with a GPU; no GPU, but a real fork.

    torch has the C library call a function of its own in each fork (torch/csrc/cuda/Module.cpp, ``poison_fork``).
    """
    is_woken, forked = True, False

    def note() -> None:
        nonlocal forked
        forked = is_woken

    os.register_at_fork(after_in_child=note)
    monkeypatch.setattr(torch._C, "_cuda_isInBadFork", lambda: forked, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    yield torch
    is_woken = False  # what is registered stays


def test_driver_that_is_awake_is_found_by_a_fork(woken: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not woken.cuda.is_initialized()
    on_gpus = devices.Devices("GPU", 2)
    [finding] = preflight.check(_FORK, on_gpus)
    assert finding.refuses
    assert "woken CUDA's driver" in finding.what and "--start_method spawn" in finding.fix
    assert preflight.check(_FORK, devices.Devices("CPU", 1)) == ()
    monkeypatch.setattr(woken.cuda, "device_count", lambda: 0)  # torch for CUDA where no GPU is
    assert preflight.check(_FORK, on_gpus) == ()


def test_fork_that_does_not_answer_is_not_waited_for(woken: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_state, "_PROBE_DEADLINE_S", 0.1)
    monkeypatch.setattr(woken._C, "_cuda_isInBadFork", lambda: time.sleep(300))
    before = processes.children(os.getpid())
    assert not device_state.forks_lose_cuda()
    assert processes.children(os.getpid()) == before


def test_initialised_xla_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = types.ModuleType("_XLAC")  # what torch_xla's compiled module says; the real one is tried in tests/xla
    monkeypatch.setitem(sys.modules, "_XLAC", compiled)
    for is_initialized in (False, True):
        monkeypatch.setattr(
            compiled, "_xla_runtime_is_initialized", lambda answer=is_initialized: answer, raising=False
        )
        assert [finding.what[:18] for finding in preflight.check(_FORK)] == ["XLA is initialised"] * is_initialized


def test_threads_of_the_users_are_warned_of_by_name() -> None:
    has_ended = threading.Event()
    thread = threading.Thread(target=has_ended.wait, name="downloads")
    thread.start()
    try:
        assert "wait" in str(thread._target)  # it belongs to the standard library, so nobody vouches for it
        [finding] = preflight.check(_FORK)
    finally:
        has_ended.set()
        thread.join()
    assert not finding.refuses
    assert "downloads" in finding.what and "locked" in finding.why
    assert preflight.check(_FORK) == ()


_LOGIN = "0::/user.slice/user-7.slice/session-3.scope\n"
_OF_MANAGER = "0::/user.slice/user-7.slice/user@7.service/app.slice/{}\n"
_SERVICE = "0::/system.slice/system-jupyter.slice/jupyter@a.service\n"
_AT_LOGOUT = "you log out of this machine"
_WITH_SERVICE = "the service jupyter@a.service is stopped or restarted"
# systemd's programs: each answers what it is asked by the environment, and only to the question that is expected.
_BUSCTL = """#!/bin/sh
manager="org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager"
[ "$*" = "get-property $manager KillUserProcesses" ] && echo "b $KILLS"
"""
_SYSTEMCTL = """#!/bin/sh
case "$*" in
    "show --property=KillMode --value jupyter@a.service") echo "$MODE" ;;
    "--user show --property=KillMode --value own.service") echo "$MODE" ;;
    *) exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("groups", "lingers", "mode", "kills", "when", "fixes"),
    [
        (_LOGIN, False, "", "true", _AT_LOGOUT, "linger, scope"),
        (_LOGIN, True, "", "true", _AT_LOGOUT, "scope"),  # the manager stays, and the session's scope doesn't
        (_LOGIN, False, "", "false", "", ""),
        (_OF_MANAGER.format("run-1.scope"), False, "", "true", _AT_LOGOUT, "linger"),
        (_OF_MANAGER.format("run-1.scope"), True, "", "true", "", ""),
        (_OF_MANAGER.format("own.service"), True, "mixed", "false", "the service own.service is stopped", "scope"),
        (_OF_MANAGER.format("own.service"), True, "process", "false", "", ""),
        (_SERVICE, False, "control-group", "false", _WITH_SERVICE, "linger, scope"),
        (_SERVICE, True, "", "true", _WITH_SERVICE, "scope"),
        (_SERVICE, False, "process", "true", "", ""),
        ("0::/gpu.slice/jupyter@a.service\n", True, "control-group", "true", _WITH_SERVICE, "scope"),
        (f"2:cpu:/\n1:name=systemd:{_SERVICE[3:]}0::/\n", True, "control-group", "true", _WITH_SERVICE, "scope"),
        ("0::/system.slice/containerd.service/pod\n", False, "control-group", "true", "", ""),
        ("0::/system.slice/run-1.scope\n", False, "control-group", "true", "", ""),
        ("0::/\n", False, "control-group", "true", "", ""),
    ],
)
def test_systemd_that_ends_a_detached_run_is_warned_of_with_what_to_type(
    groups: str, lingers: bool, mode: str, kills: str, when: str, fixes: str, tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, text in (("busctl", _BUSCTL), ("systemctl", _SYSTEMCTL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
        if not os.access(tmp_path / name, os.X_OK):
            pytest.skip("NOT TESTED: the folder for temporary files is mounted with noexec")
    user = pwd.getpwuid(os.getuid()).pw_name
    (tmp_path / "groups").write_text(groups)
    if lingers:
        (tmp_path / user).touch()
    monkeypatch.setattr(preflight, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(preflight, "_LINGERING", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("MODE", mode)
    monkeypatch.setenv("KILLS", kills)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    found = preflight.check_detached()
    if not when:
        assert found == ()
        return
    [finding] = found
    assert finding.what.startswith(f"systemd ends a detached run when {when}")
    assert not finding.refuses
    scope = f"XDG_RUNTIME_DIR=/run/user/{os.getuid()} systemd-run --user --scope jupyter lab"
    assert (f"loginctl enable-linger {user}, once" in finding.fix) == ("linger" in fixes)
    assert (scope in finding.fix) == ("scope" in fixes)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert "XDG_RUNTIME_DIR" not in preflight.check_detached()[0].fix


def test_without_control_groups_or_systemd_no_detached_run_is_ended_by_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_GROUPS", tmp_path / "groups")
    assert preflight.check_detached() == ()
    (tmp_path / "groups").write_text(_LOGIN)
    monkeypatch.setenv("PATH", str(tmp_path))  # there is nobody to ask
    assert preflight.check_detached() == ()
