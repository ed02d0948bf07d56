"""Launches in containers, sandboxes and on clusters' nodes, each set up for real in processes of its own."""

from __future__ import annotations

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import textwrap

import pytest

from tests import kernels

pytestmark = pytest.mark.slow

_CHILDREN = "open(f'/proc/self/task/{os.getpid()}/children').read()"
# Forbids this process and its children one system call, as a container's sandbox does: see linux/seccomp.h.
_FORBID = """
import ctypes, os, struct
def forbid(number, error):
    rows = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | error), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rows), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    if libc.prctl(22, 2, program, 0, 0) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        print("NOT TESTED:", os.strerror(ctypes.get_errno()), flush=True); os._exit(0)
"""
_LAUNCH = """
import errno, os
from notebook_accel import notebook_launcher
def work():
    print("from a rank")
    return int(os.environ["RANK"])
def launch(**options):
    return list(notebook_launcher(work, num_processes=2, use_cpu=True, **options))
"""
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279}.get(os.uname().machine, -1)  # asm/unistd.h


def run(code: str, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script, by a command if there is one."""
    done = subprocess.run(
        [*command, sys.executable, "-c", _LAUNCH + textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if "NOT TESTED" in done.stdout:
        pytest.skip(done.stdout)
    return done


@pytest.mark.parametrize(("call", "number", "error"), [
    ("pidfd_open", 434, "ENOSYS"),
    ("pidfd_send_signal", 424, "EPERM"),
    ("memfd_create", _MEMFD_CREATE, "EPERM"),
])  # fmt: skip
def test_system_without_a_call_is_named_before_anything_starts(call: str, number: int, error: str) -> None:
    done = run(f"""{_FORBID}
forbid({number}, errno.{error})
try:
    launch()
except Exception as error:
    print(type(error).__name__, error, repr({_CHILDREN}), sep="|")
""")
    name, text, children = done.stdout.strip().split("|")
    said = {"ENOSYS": "Function not implemented", "EPERM": "Operation not permitted"}[error]
    assert (name, children) == ("PreflightError", "''"), done.stderr
    assert f"Launching needs a system call that this system refuses: {call} ({said})." in text
    assert "seccomp" in text and "--start_method inline" in text


def test_python_that_was_built_with_old_headers_launches(tmp_path: pathlib.Path) -> None:
    """Its own wrappers are missing, in all processes; the system has the calls."""
    (tmp_path / "sitecustomize.py").write_text(
        "import fcntl, os, signal\n"
        "for module, names in ((os, ('pidfd_open', 'memfd_create')), (signal, ('pidfd_send_signal',)),\n"
        "                      (os, [n for n in dir(os) if n.startswith('MFD_')]),\n"
        "                      (fcntl, [n for n in dir(fcntl) if 'SEAL' in n])):\n"
        "    for name in names: delattr(module, name)\n"
    )
    done = run(
        """
        from notebook_accel.launching import processes
        print(hasattr(os, "pidfd_open"), launch(), launch(start_method="fork"), launch(log_dir=""))
        child = os.fork()
        if child == 0:
            import time; time.sleep(60)
        processes.pidfd_send_signal(processes.pidfd_open(child), 9)
        print(os.waitpid(child, 0)[1])
        """,
        PYTHONPATH=str(tmp_path),
    )
    assert done.stdout.splitlines()[-2:] == ["False [0, 1] [0, 1] [0, 1]", "9"], done.stdout + done.stderr


def in_a_namespace(*mounts: str) -> list[str]:
    """A command that has mounts of its own."""
    command = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("NOT TESTED: no mount namespace can be made here")
    # The project and its environment are put back if they lie in a folder that is mounted over.
    needed = {os.getcwd(), sys.prefix, sys.base_prefix}
    steps = [f"exec {number}<{shlex.quote(path)}" for number, path in enumerate(needed, 5)]
    for options, folder in (mount.rsplit(maxsplit=1) for mount in mounts):
        inside = [(number, path) for number, path in enumerate(needed, 5) if path.startswith(f"{folder}/")]
        steps.append(f"mount -t tmpfs {options.replace('-o ro ', '')} {folder}")
        for number, path in inside:
            target = shlex.quote(path)
            steps.append(f"mkdir -p {target} && mount --no-canonicalize --bind /proc/self/fd/{number} {target}")
        if options.startswith("-o ro "):
            steps.append(f"mount -o remount,bind,ro {folder}")
    return [*command, "sh", "-c", " && ".join([*steps, 'exec "$@"']), "sh"]


def test_nowhere_to_write_is_no_reason_not_to_launch() -> None:
    """Neither among the temporary files nor in /dev/shm, nor in the working directory."""
    folders = ("/tmp", "/var/tmp", "/dev/shm", "/mnt")
    command = in_a_namespace(*(f"-o ro none {folder}" for folder in folders))
    code = f"os.chdir('/mnt')\nprint(launch())\nprint(repr({_CHILDREN}.split()[2:]))"
    done = run(code, *command, HOME="/mnt", TMPDIR="/tmp")
    assert {"0 │ from a rank", "1 │ from a rank"} <= {*kernels.unfolded(done.stdout)}, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == ["[0, 1]", "[]"]
    assert "its output is kept in memory" in done.stdout
    assert "/dev/shm can't be written to" in done.stderr and "num_workers=0" in done.stderr


def test_little_shared_memory_is_enough_to_launch() -> None:
    done = run("print(launch(start_method='fork'), launch())", *in_a_namespace("-o size=4k none /dev/shm"))
    assert done.stdout.splitlines()[-1:] == ["[0, 1] [0, 1]"], done.stdout + done.stderr
    assert "/dev/shm has 4 KiB left" in done.stderr


def test_long_temporary_folder_is_warned_of_and_sessions_meet_there(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    done = run(
        """
        from notebook_accel.sessions.kernel.session import Session
        with Session(num_processes=2, use_cpu=True, view="none") as session:
            print(session.execute("import os\\nint(os.environ['RANK'])"))
        """,
        TMPDIR=str(folder),
    )
    assert done.returncode == 0 and "0" in done.stdout, done.stdout + done.stderr
    assert f"has a path of {len(str(folder))} bytes" in done.stderr and "TMPDIR" in done.stderr


# In a module that Python imports before all else: the time of day jumps in all processes once a file is there.
_CLOCK = """
import os, time
def jump(): return int(os.environ["JUMP_S"]) if os.path.exists(os.environ["JUMP_FILE"]) else 0
time_s, time_ns = time.time, time.time_ns
time.time = lambda: time_s() + jump()
time.time_ns = lambda: time_ns() + jump() * 10**9
"""


@pytest.mark.parametrize(("days", "restarts"), [(-1, 0), (1, 1)])
def test_clock_that_jumps_by_a_day_ends_nothing(tmp_path: pathlib.Path, days: int, restarts: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(_CLOCK)
    done = run(
        f"""
        import pathlib, threading, time
        folder, has_jumped = pathlib.Path({str(tmp_path)!r}), pathlib.Path(os.environ["JUMP_FILE"])
        def trains_through_a_jump():
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            dist.barrier()
            before_s, since_s = time.time(), time.monotonic()
            rank = dist.get_rank()
            (folder / str(rank)).touch()
            while rank == 0 and not has_jumped.exists():  # the other one waits for it in the collective
                time.sleep(0.01)
            total = torch.tensor(rank + 1.0)
            dist.all_reduce(total)
            dist.destroy_process_group()
            dist.init_process_group("gloo")
            dist.all_reduce(total)
            return abs((time.time() - before_s) - (time.monotonic() - since_s)) > 3600, float(total)
        def jump():
            deadline = time.monotonic() + 60
            while not all((folder / str(rank)).exists() for rank in (0, 1)):
                if time.monotonic() > deadline: return
                time.sleep(0.01)
            has_jumped.touch()
        threading.Thread(target=jump).start()
        options = dict(num_processes=2, use_cpu=True, max_restarts={restarts}, timeout_s=60)
        print(list(notebook_launcher(trains_through_a_jump, **options)))
        """,
        PYTHONPATH=str(tmp_path),
        JUMP_FILE=str(tmp_path / "jump"),
        JUMP_S=str(86_400 * days),
    )
    assert done.stdout.splitlines()[-1:] == ["[(True, 6.0), (True, 6.0)]"], done.stdout + done.stderr
    assert "no step for" not in done.stdout
