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


@pytest.mark.parametrize(("line", "folder"), [("0::/job", "job"), ("3:cpu,cpuacct:/job", "cpu/job")])
def test_delays_between_two_looks(
    line: str, folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def pass_time(now_s: float, core_ns: int, throttled: int, stalled_us: int, used_ticks: int) -> None:
        monkeypatch.setattr(host_memory.time, "monotonic", lambda: now_s)
        monkeypatch.setattr(host_memory.time, "process_time", lambda: used_ticks / 100)
        own = " ".join(["0", f"{used_ticks}", "0", "50", "0", "0", "0", f"{used_ticks // 3}", "0"])
        write("stat", f"cpu  9 9 9 9 9 9 9 9\ncpu{min(os.sched_getaffinity(0))} {own}\ncpu999 9 9 9 9 9 9 9 9\n")
        write("task/1/schedstat", "5 70 9\n")
        write("task/2/schedstat", f"5 {core_ns} 9\n")
        write(f"{folder}/cpu.stat", f"nr_periods {now_s * 10:.0f}\nnr_throttled {throttled}\n")
        for resource in ("memory", "io"):
            write(f"pressure/{resource}", f"some avg10=0.00 total={stalled_us}\nfull avg10=0.00 total=9\n")
            stalled_us *= 2

    marks = {"job/cpu.max": "max 100000", "cpu/job/cpu.cfs_quota_us": "-1"}
    for name, text in marks.items():
        write(name, text)
    write("cgroup", f"{line}\n")
    paths = {"_CGROUPS": "", "_MEMBERSHIP": "cgroup", "_PRESSURE": "pressure", "_THREADS": "task", "_STAT": "stat"}
    for name, path in paths.items():
        monkeypatch.setattr(host_memory, name, tmp_path / path)
    pass_time(100, core_ns=10**9, throttled=3, stalled_us=1_000_000, used_ticks=300)
    watch = host_memory.DelayWatch()
    pass_time(102, core_ns=2 * 10**9, throttled=8, stalled_us=1_200_000, used_ticks=450)
    assert watch.take() == pytest.approx((0.5, 0.25, 0.25, 0.1, 0.2))
    pass_time(103, core_ns=2 * 10**9, throttled=8, stalled_us=9_000_000, used_ticks=450)
    assert watch.take() == (0, 0, 0, 1, 1)


def test_memory_and_disks_that_other_containers_wait_for_do_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def pass_time(now_s: float, own_us: int, machines_us: int) -> None:
        monkeypatch.setattr(host_memory.time, "monotonic", lambda: now_s)
        for name in ("memory", "io"):
            (tmp_path / "job" / f"{name}.pressure").write_text(f"some avg10=0.00 total={own_us}\n")
            (tmp_path / name).write_text(f"some avg10=0.00 total={machines_us}\n")

    (tmp_path / "job").mkdir()
    (tmp_path / "cgroup").write_text("0::/job\n")
    paths = {"_CGROUPS": "", "_MEMBERSHIP": "cgroup", "_PRESSURE": "", "_THREADS": "task", "_STAT": "task"}
    for name, path in paths.items():
        monkeypatch.setattr(host_memory, name, tmp_path / path)
    pass_time(100, own_us=0, machines_us=0)
    watch = host_memory.DelayWatch()
    pass_time(101, own_us=250_000, machines_us=900_000)
    assert watch.take() == (0, 0, 0, 0.25, 0.25)
    pass_time(102, own_us=0, machines_us=950_000)  # in another group
    assert watch.take() == (0, 0, 0, 0, 0)


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


def test_delays_where_linux_measures_none(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    for name in ("_MEMBERSHIP", "_PRESSURE", "_THREADS", "_STAT"):
        monkeypatch.setattr(host_memory, name, tmp_path / "missing")
    assert host_memory.DelayWatch().take() == (0, 0, 0, 0, 0)


def test_busy_threads_on_one_core_wait_for_it() -> None:
    code = (
        "import os, subprocess, sys, time; core = {min(os.sched_getaffinity(0))}; os.sched_setaffinity(0, core)\n"
        "from notebook_accel import host_memory\n"
        "other = subprocess.Popen([sys.executable, '-c', 'while True: pass'])\n"
        "watch, ends_s = host_memory.DelayWatch(), time.monotonic() + 1\n"
        "while time.monotonic() < ends_s: pass\n"
        "print(watch.take().core); other.kill(); other.wait()"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert 0.2 < float(run.stdout) <= 1
