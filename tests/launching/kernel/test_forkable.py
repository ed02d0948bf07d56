"""What start method ``fork`` is refused and warned for."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator

import pytest

from notebook_accel.config import LaunchConfig
from notebook_accel.launching import device_state
from notebook_accel.launching.kernel import preflight
from notebook_accel.launching.kernel.devices import Devices
from tests import processes

FORK = LaunchConfig(num_processes=2, use_cpu=True, start_method="fork")


def test_nothing_speaks_against_a_fork_of_this_process() -> None:
    assert preflight.check(FORK) == ()


def test_initialised_cuda_is_refused_whatever_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    # The real flag, without the GPU that would set it.
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: torch.cuda._initialized)
    [finding] = preflight.check(FORK.replace(allow_initialized_cuda=True))
    assert finding.refuses
    assert "CUDA is initialised" in finding.what and "--start_method spawn" in finding.fix


@pytest.fixture
def woken(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """torch as ``torch.cuda.is_available()`` leaves it on a machine with a GPU; no GPU, but a real fork.

    torch has the C library call a function of its own in each fork (torch/csrc/cuda/Module.cpp, ``poison_fork``).
    """
    torch = pytest.importorskip("torch")
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
    on_gpus = Devices("GPU", 2)
    [finding] = preflight.check(FORK, on_gpus)
    assert finding.refuses
    assert "woken CUDA's driver" in finding.what and "--start_method spawn" in finding.fix
    assert preflight.check(FORK, Devices("CPU", 1)) == ()
    monkeypatch.setattr(woken.cuda, "device_count", lambda: 0)  # torch for CUDA where no GPU is
    assert preflight.check(FORK, on_gpus) == ()


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
        assert [finding.what[:18] for finding in preflight.check(FORK)] == ["XLA is initialised"] * is_initialized


def test_threads_of_the_users_are_warned_of_by_name() -> None:
    has_ended = threading.Event()
    thread = threading.Thread(target=has_ended.wait, name="downloads")
    thread.start()
    try:
        assert "wait" in str(thread._target)  # it belongs to the standard library, so nobody vouches for it
        [finding] = preflight.check(FORK)
    finally:
        has_ended.set()
        thread.join()
    assert not finding.refuses
    assert "downloads" in finding.what and "locked" in finding.why
    assert preflight.check(FORK) == ()


def test_finding_out_imports_nothing() -> None:
    code = (
        "import sys; from notebook_accel.launching.kernel import preflight; preflight.check_fork();"
        "assert not {'torch', 'torch_xla', 'jax'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
    assert device_state.is_xla_initialized() is False
