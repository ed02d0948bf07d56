"""The memory and processors of the machine and of control groups, compared with other sources."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

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
