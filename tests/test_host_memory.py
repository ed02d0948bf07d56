"""The memory and processors of the machine and of control groups, compared with other sources."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading

import psutil
import pytest

from notebook_accel import host_memory


def test_no_more_than_the_machine_has() -> None:
    def machine_bytes() -> int:
        return int(psutil.virtual_memory().available + psutil.swap_memory().free)

    before_bytes, said_bytes, after_bytes = machine_bytes(), host_memory.available_bytes(), machine_bytes()
    assert 0 < said_bytes <= max(before_bytes, after_bytes) + (256 << 20)  # other processes start and end meanwhile


@pytest.mark.parametrize(("line", "files"), [
    ("0::/user/job", {"memory.max": "5000000\n", "memory.current": "3000000\n",
                      "memory.stat": "anon 1\ninactive_file 500000\n", "memory.events": "oom 9\noom_kill 3\n"}),
    ("4:memory:/user/job", {"memory/memory.limit_in_bytes": "5000000\n", "memory/memory.usage_in_bytes": "3000000\n",
                            "memory/memory.stat": "total_inactive_file 500000\n",
                            "memory/memory.oom_control": "oom_kill 3\n"}),
], ids=["version 2", "version 1"])  # fmt: skip
def test_limit_of_a_control_group_around_ours(
    line: str, files: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    # These are files as a container sees them: a test has no rights to make a group with a limit.
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "cgroup").write_text(f"12:devices:/\n{line}\n")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "_MEMBERSHIP", tmp_path / "cgroup")
    assert host_memory.available_bytes() == 2_500_000
    assert host_memory.total_bytes() == 5_000_000
    assert list(host_memory.kills().values()) == [3]


@pytest.mark.parametrize(("line", "files", "count"), [
    ("0::/user/job", {"cpu.max": "150000 100000\n"}, 2),
    ("0::/user/job", {"cpu.max": "max 100000\n"}, 64),
    ("0::/user/job", {"cpu.max": "800000 100000\n", "user/cpu.max": "50000 100000\n"}, 1),
    ("0::/user/job", {"user/job/cpu.max": "9000000 100000\n"}, 64),
    ("3:cpu,cpuacct:/user/job", {"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ("3:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
    ("3:cpuset:/", {"cpu.max": "100000 100000\n"}, 64),
])  # fmt: skip
def test_processors_of_a_control_group(
    line: str, files: dict[str, str], count: int, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "cgroup").write_text(f"12:devices:/\n{line}\n")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "_MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    assert host_memory.cores() == count


def test_processors_of_this_process_alone() -> None:
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    code += "from notebook_accel import host_memory; print(host_memory.cores())"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert run.stdout == "1\n"


def test_group_without_a_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cgroup").write_text("0::/\n")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "_MEMBERSHIP", tmp_path / "cgroup")
    assert host_memory.available_bytes() > 100_000_000


def test_waiting_for_cores_between_two_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    def pass_time(now_s: float, first_ns: int, second_ns: int) -> None:
        monkeypatch.setattr(host_memory.time, "monotonic", lambda: now_s)
        for thread, waited_ns in (("1", first_ns), ("2", second_ns)):
            (tmp_path / thread).mkdir(exist_ok=True)
            (tmp_path / thread / "schedstat").write_text(f"5 {waited_ns} 9\n")

    monkeypatch.setattr(host_memory, "_THREADS", tmp_path)
    pass_time(100, first_ns=70, second_ns=10**9)
    watch = host_memory.CoreWatch()
    pass_time(102, first_ns=70, second_ns=2 * 10**9)
    assert watch.take() == 0.5
    pass_time(103, first_ns=70, second_ns=2 * 10**9)
    assert watch.take() == 0


def test_waiting_of_the_packages_own_threads_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(host_memory, "_THREADS", tmp_path)
    done, found = threading.Event(), []
    for name in ("notebook-accel-test", "of the program"):
        thread = threading.Thread(target=done.wait, name=name)
        thread.start()
        (tmp_path / f"{thread.native_id}").mkdir()
        (tmp_path / f"{thread.native_id}" / "schedstat").write_text("5 70 9\n")
        found.append(f"{thread.native_id}")
    waits = host_memory._waits_for_cores()
    done.set()
    assert waits == {found[1]: 70}


def test_waiting_for_cores_where_linux_measures_none(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(host_memory, "_THREADS", tmp_path / "missing")
    assert host_memory.CoreWatch().take() == 0


def test_busy_threads_on_one_core_wait_for_it() -> None:
    code = (
        "import os, subprocess, sys, time; core = {min(os.sched_getaffinity(0))}; os.sched_setaffinity(0, core)\n"
        "from notebook_accel import host_memory\n"
        "other = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "watch, ends_s = host_memory.CoreWatch(), time.monotonic() + 1\n"
        "while time.monotonic() < ends_s: pass\n"
        "print(watch.take()); other.kill(); other.wait()"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert 0.2 < float(run.stdout) <= 1
