"""Whoever was stopped with SIGSTOP: an interrupt ends the run, runs end well, and the kernel's end leaves nothing."""

from __future__ import annotations

import os
import pathlib
import signal
import uuid

import pytest

from tests import kernels, processes
from tests.launches import prepare

WORKS = "%%distributed -n 2\nint(os.environ['RANK'])"
WITH_WORKERS = """%%distributed -n 2
from torch.utils.data import DataLoader
batches = iter(DataLoader(range(1000), num_workers=2)); next(batches)
print("up", flush=True)
time.sleep(300)"""


def find(kernel: kernels.Kernel, who: str) -> processes.Process:
    """The agent, the template or a rank of a kernel."""
    [agent] = [child for child in processes.children(kernel.pid) if processes.is_agent(child)]
    if who == "agent":
        return agent
    [template] = processes.children(agent.pid)
    return template if who == "template" else processes.children(template.pid)[0]


def stop(kernel: kernels.Kernel, who: str) -> None:
    process = find(kernel, who)

    def is_stopped() -> bool:
        os.kill(process.pid, signal.SIGSTOP)  # each time: whoever looks after it may have let it go on
        now = processes.read(process.pid)
        return now is not None and now.state == "T"

    processes.wait_until(is_stopped, f"the {who} is stopped")


def wait_until_dead(everything: list[processes.Process]) -> None:
    processes.wait_until(lambda: not any(process.is_alive for process in everything), "all processes are gone")


_RANK_AND_OTHERS = ["rank", *(pytest.param(who, marks=pytest.mark.slow) for who in ("agent", "template"))]


@pytest.mark.parametrize("who", _RANK_AND_OTHERS)
def test_interrupt_reaches_ranks_whoever_is_stopped(notebook: kernels.Kernel, tmp_path: pathlib.Path, who: str) -> None:
    cell = notebook.start(f"""%%distributed -n 2
try:
    print("up", flush=True)
    time.sleep(60)
finally:
    open(os.path.join({str(tmp_path)!r}, os.environ["RANK"]), "w").close()""")
    cell.wait_for_ranks("up")
    agent = find(notebook, "agent")
    stop(notebook, who)
    notebook.interrupt()
    assert cell.finish().error_name == "KeyboardInterrupt"
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
    assert notebook.run(WORKS).result == "[0, 1]"
    assert find(notebook, "agent") == agent


@pytest.mark.slow
@pytest.mark.parametrize("who", ["agent", "template"])
def test_run_ends_well_though_somebody_was_stopped(notebook: kernels.Kernel, tmp_path: pathlib.Path, who: str) -> None:
    cell = notebook.start(f"""%%distributed -n 2
print("up", flush=True)
while not os.path.exists({str(tmp_path / "go")!r}): time.sleep(0.01)
int(os.environ["RANK"])""")
    cell.wait_for_ranks("up")
    stop(notebook, who)
    (tmp_path / "go").touch()
    assert cell.finish().result == "[0, 1]"


# A kernel of its own starts, imports torch, and has workers, as have its ranks.
@pytest.mark.parametrize("stopped", [("rank", "agent"), pytest.param(("template",), marks=pytest.mark.slow)])
def test_killed_kernel_leaves_nothing(fresh_notebook: kernels.Kernel, stopped: tuple[str, ...]) -> None:
    worker = "from torch.utils.data import DataLoader\nmine = iter(DataLoader(range(99), num_workers=1)); next(mine)"
    assert fresh_notebook.run(worker).status == "ok"
    cell = fresh_notebook.start(WITH_WORKERS)
    cell.wait_for_ranks("up")
    everything = fresh_notebook.descendants()
    assert len(everything) >= 9  # the kernel's own worker, agent, template, two ranks, and two workers of each
    for who in stopped:
        stop(fresh_notebook, who)
    fresh_notebook.kill()
    wait_until_dead(everything)


@pytest.mark.slow
def test_kernel_that_unloads_or_ends_leaves_nothing(tmp_path: pathlib.Path) -> None:
    with kernels.running(tmp_path) as kernel:
        for is_last in (False, True):
            prepare(kernel)
            kernel.run(WITH_WORKERS.replace("-n 2", "-n 2 --background --out job --view none"))
            processes.wait_until(lambda: len(kernel.descendants()) >= 8, "agent, template, ranks and their workers")
            everything = kernel.descendants()
            stop(kernel, "rank")
            stop(kernel, "agent")
            if not is_last:
                assert kernel.run("%unload_ext notebook_accel").status == "ok"
                assert kernel.run("job.done, job.status").result == "(True, 'stopped')"
                wait_until_dead(everything)
    wait_until_dead(everything)


def held(kernel: kernels.Kernel) -> list[tuple[int, int]]:
    """Return the numbers of open files and threads of the kernel and of each process below it."""
    pids = [kernel.pid, *(child.pid for child in kernel.descendants())]
    return [(len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))) for pid in pids]


@pytest.mark.slow
def test_ten_interrupts_leave_no_more_than_two(notebook: kernels.Kernel) -> None:
    after_two: list[tuple[int, int]] = []
    for number in range(10):
        running = notebook.start("%%distributed -n 2\nprint('up', flush=True)\ntime.sleep(60)")
        running.wait_for_ranks("up")
        notebook.interrupt()
        assert running.finish().error_name == "KeyboardInterrupt"
        if number == 1:
            after_two = held(notebook)

    def is_all_closed() -> bool:
        now = held(notebook)
        pairs = zip(now, after_two, strict=False)
        return len(now) <= len(after_two) and all(a <= b and c <= d for (a, c), (b, d) in pairs)

    processes.wait_until(is_all_closed, "no process holds more than after two interrupts")


@pytest.mark.parametrize(
    ("method", "then"),
    [
        ("spawn", ""),
        ("spawn", "raise ValueError('with open memory')"),
        ("spawn", "os.kill(os.getpid(), 9)"),
        pytest.param("fork", "", marks=pytest.mark.slow),
        pytest.param("fork", "os.kill(os.getpid(), 9)", marks=pytest.mark.slow),
    ],
)
def test_shared_memory_of_ranks_goes_with_them_and_the_kernels_stays(
    notebook: kernels.Kernel, method: str, then: str
) -> None:
    name = f"notebook-accel-{uuid.uuid4().hex[:12]}"
    notebook.run(f"""from multiprocessing.shared_memory import SharedMemory
of_kernel = SharedMemory("{name}-kernel", create=True, size=8)
of_kernel.buf[0] = 7""")
    outcome = notebook.run(f"""%%distributed -n 2 --start_method {method}
import torch.distributed as dist
from multiprocessing.shared_memory import SharedMemory
rank = int(os.environ["RANK"])
made = SharedMemory(f"{name}-{{rank}}", create=True, size=8)
dist.init_process_group("gloo")
dist.barrier()  # both have been made
others = SharedMemory("{name}-kernel"), SharedMemory(f"{name}-{{1 - rank}}")
again = SharedMemory(made.name)
value = others[0].buf[0]
others[0].buf[1 + rank] = value + 1
dist.barrier()
{then}
value""")
    assert (outcome.result or outcome.error_name) == ("RankFailedError" if then else "[7, 7]"), outcome.traceback
    assert "KeyError" not in outcome.stdout + outcome.stderr + outcome.traceback  # of a tracker

    def left() -> list[str]:
        return sorted(path.name for path in pathlib.Path("/dev/shm").glob(f"{name}-*"))

    if then:  # the one that removes it isn't waited for if its rank was killed
        processes.wait_until(lambda: left() == [f"{name}-kernel"], "the ranks' shared memory is gone")
    assert left() == [f"{name}-kernel"]
    kept = notebook.run("value = list(of_kernel.buf[:3]); of_kernel.close(); of_kernel.unlink(); value")
    assert kept.result == "[7, 8, 8]"
    notebook.run("from multiprocessing import resource_tracker; resource_tracker._resource_tracker._stop()")


def test_nothing_of_the_kernels_own_is_changed(notebook: kernels.Kernel, tmp_path: pathlib.Path) -> None:
    look = """import os, signal, torch.distributed
def seen():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    return handlers, mask, signal.set_wakeup_fd(-1), dict(os.environ), os.getcwd(), torch.distributed.is_initialized()
"""
    assert notebook.run(look + "before = seen()").status == "ok"
    assert notebook.run(WORKS).result == "[0, 1]"
    assert notebook.run("%%distributed -n 2\nraise ValueError").error_name == "RankFailedError"
    cell = notebook.start("%%distributed -n 2\nprint('up', flush=True)\ntime.sleep(60)")
    cell.wait_for_output("1 │ up")
    notebook.interrupt()
    assert cell.finish().error_name == "KeyboardInterrupt"
    assert notebook.run("before == seen(), len(before[0]) > 30").result == "(True, True)"
