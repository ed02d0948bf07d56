"""The same launch by every start method and on a cluster, and what each start method has of its own."""

from __future__ import annotations

import ast
import contextlib
import os
import pathlib
import re
import signal
from collections.abc import Callable

import pytest

from tests import kernels, processes
from tests.launches import FIRST_LAUNCH_S, RAY, Way, prepare

Run = Callable[[str], kernels.Outcome]

SEVERAL = ["spawn", "fork", RAY]
METHODS = [*SEVERAL, "inline"]
_SPAWN_WITH_OLD_FRONT_ENDS = [pytest.param("spawn", marks=pytest.mark.front_end), *METHODS[1:]]


# What holds however ranks come into being ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", _SPAWN_WITH_OLD_FRONT_ENDS, indirect=True)
def test_ranks_are_one_group_and_return_what_they_are(run: Run, done: Run, how: Way) -> None:
    count = how.ranks
    outcome = done(f"""%%distributed -n {count} {how}
import torch, torch.distributed as dist
totals = []
for round in range(2):
    dist.init_process_group("gloo")
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"  # as torch's tutorial does
    total = torch.tensor([dist.get_rank() + 1 + round])
    dist.all_reduce(total)
    totals.append(int(total))
    dist.destroy_process_group()
(int(os.environ["RANK"]), os.environ["WORLD_SIZE"], totals)""")
    totals = [sum(rank + 1 + group for rank in range(count)) for group in range(2)]
    assert outcome.result == str([(rank, str(count), totals) for rank in range(count)])
    assert run("'RANK' in os.environ, torch.distributed.is_initialized()").result == "(False, False)"


@pytest.mark.parametrize("how", ["spawn", "inline", RAY], indirect=True)
def test_programs_parse_no_arguments_in_a_rank(run: Run, done: Run, how: Way) -> None:
    """Neither the kernel's own, nor an empty program name, of which transformers can't make a path."""
    done("""import argparse, pathlib, sys
def parsed():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    return sys.argv, parser.parse_args().lr, str(pathlib.Path(sys.argv[0]).with_suffix(".args"))""")
    before = run("sys.argv").result
    outcome = done(f"%%distributed -n {how.ranks} {how}\nparsed()")
    assert ast.literal_eval(outcome.result) == [(["cell.py"], 0.1, "cell.args")] * how.ranks
    assert run("sys.argv").result == before != "['cell.py']"


def test_objects_of_the_kernels_manager_are_shared_with_ranks_and_their_children(done: Run) -> None:
    done("""import multiprocessing, os
manager = multiprocessing.Manager()
seen, nested, turns = manager.dict(), manager.list([manager.list()]), manager.Queue()
def note(rank):
    seen[f"child of {rank}"] = True
    nested[0].append(rank)""")
    outcome = done("""%%distributed -n 2
rank = int(os.environ["RANK"])
seen[rank] = True
turns.put(rank)
with multiprocessing.get_context("spawn").Pool(1) as pool:
    pool.map(note, [rank])
len(nested)""")
    assert outcome.result == "[1, 1]"
    shared = done("sorted(map(str, seen.keys())), sorted(nested[0]), turns.qsize()").result
    assert ast.literal_eval(shared) == (["0", "1", "child of 0", "child of 1"], [0, 1], 2)
    done("manager.shutdown()")


@pytest.mark.parametrize("how", _SPAWN_WITH_OLD_FRONT_ENDS, indirect=True)
def test_names_arguments_pulled_names_and_classes(run: Run, done: Run, how: Way) -> None:
    done("class Model:\n    def __init__(self, size): self.size = size\nmodel, grown = Model(3), None")
    outcome = done(f"""%%distributed -n {how.ranks} {how} --pull grown --args (5,)
grown = Model(model.size + 1)
def work(x): return x + model.size""")
    assert outcome.result == str([8] * how.ranks)
    assert run("type(grown) is Model, grown.size").result == "(True, 4)"
    done(f"""from notebook_accel import notebook_launcher
def make(size, *, more): return Model(size + more), make, Model
made = notebook_launcher(make, (1,), {how.ranks}, {how.keywords}, kwargs={{"more": 2}})""")
    expected = "(True, 3, True, True)"
    assert (
        run("type(made[-1][0]) is Model, made[-1][0].size, made[0][1] is make, made[0][2] is Model").result == expected
    )


@pytest.mark.parametrize("how", ["spawn", RAY], indirect=True)
def test_value_that_cannot_be_opened_loses_no_other_and_can_be_asked_for_again(
    run: Run, done: Run, how: Way, tmp_path: pathlib.Path
) -> None:
    """Here of a module that only the ranks can import."""
    module = f"of_{tmp_path.name}"  # the kernel, which has imported another one, is that of all tests here
    (tmp_path / f"{module}.py").write_text("class Held:\n    def __init__(self, what): self.what = what\n")
    done("import sys, threading\nweights, late, lock, held = torch.zeros(5000), None, None, None")
    outcome = run(f"""%%distributed -n 2 {how} --pull weights,held,late,lock --out values
import sys, threading
sys.path.append({str(tmp_path)!r})
import {module}
weights += 1
held, lock = {module}.Held(weights), threading.Lock()
del late
held if int(os.environ["RANK"]) else 7""")
    assert outcome.error_name == "ResultError"
    text = outcome.traceback
    for expected in (
        "4 of the ranks' values can't be read:",
        "the result of rank 1 can't be unpickled here: ModuleNotFoundError: No module named",
        'name "held" of rank 0 can\'t be unpickled here: ModuleNotFoundError',
        "--pull late: rank 0 has no name 'late'",
        'name "lock" of rank 0 can\'t be sent to another process: it is a lock.',
        "Pulled all the same: weights",
        "The values of rank 0 are in this error: sys.last_value.values",
    ):
        assert expected in text
    assert run("float(weights.mean()), held, lock, sys.last_value.values").result == "(1.0, None, None, {0: 7})"
    run(f"sys.path.append({str(tmp_path)!r}); again = sys.last_value.job")
    second = run("again.results()")
    assert second.error_name == "ResultError" and "Pulled all the same: weights, held" in second.traceback
    held = done("held.what is weights, int(sys.last_value.values[1].what.sum())")
    assert held.result == "(True, 5000)"
    done(f"sys.path.remove({str(tmp_path)!r})")


@pytest.mark.parametrize("how", ["spawn", RAY], indirect=True)
def test_what_cannot_be_sent_is_named_by_the_way_to_it(run: Run, done: Run, how: Way) -> None:
    done("import threading\nbox = {'inner': [threading.Lock()]}")
    outcome = run(f"%%distributed -n 2 {how}\nlen(box)")
    assert (outcome.status, outcome.error_name) == ("error", "PayloadError")
    assert "global \"box\" -> item 'inner' -> item 0" in outcome.traceback
    assert "Launching" not in outcome.stdout


@pytest.mark.parametrize("how", METHODS, indirect=True)
def test_failure_shows_its_own_line_and_has_its_exception(run: Run, done: Run, how: Way) -> None:
    done(
        "from notebook_accel import RankFailedError, notebook_launcher\n"
        "class Special(Exception): pass\ndef special(): raise Special('mine', 3)\n"
        "def inner(x):\n    return x / 0  # this line"
    )
    count = how.ranks
    outcome = run(f"%%distributed -n {count} {how}\ntime.sleep(0)\ninner(3)")
    assert (outcome.status, outcome.error_name) == ("error", "RankFailedError")
    for expected in (
        f"of {count} failed at In[",
        "line 3",
        "inner(3)",
        "return x / 0  # this line",
        "ZeroDivisionError",
    ):
        assert expected in outcome.traceback
    done(f"""try: notebook_launcher(special, num_processes={count}, {how.keywords})
except RankFailedError as error: caught = error""")
    cause = run("type(caught.__cause__) is Special, caught.__cause__.args, caught.world_size, caught.exit_code")
    assert cause.result == f"(True, ('mine', 3), {count}, 1)"
    assert run(f"%%distributed -n {count} {how}\n'works'").result == str(["works"] * count)


@pytest.mark.parametrize("how", _SPAWN_WITH_OLD_FRONT_ENDS, indirect=True)
def test_interrupt_runs_finally_and_keeps_the_kernel(run: Run, done: Run, notebook: kernels.Kernel, how: Way) -> None:
    done("kept = []")
    cell = notebook.start(f"""%%distributed -n {how.ranks} {how}
try:
    print("in the loop", flush=True); time.sleep(60)
finally:
    print("tidied up", flush=True)""")
    cell.wait_for_output("in the loop")
    for rank in range(how.ranks if how.ranks > 1 else 0):
        cell.wait_for_output(f"{rank} │ in the loop")
    notebook.interrupt()
    outcome = cell.finish()
    assert (outcome.status, outcome.error_name) == ("error", "KeyboardInterrupt")
    assert "\n".join(kernels.unfolded(outcome.stdout)).count("tidied up") == how.ranks
    assert "rank 0 was at In[" in outcome.traceback and "line 3" in outcome.traceback
    assert run("kept").result == "[]"


@pytest.mark.parametrize("how", ["spawn", "inline", RAY], indirect=True)
def test_metrics_and_progress_are_shown(done: Run, how: Way) -> None:
    outcome = done(f"""%%distributed -n {how.ranks} {how}
from notebook_accel import Accelerator, report
for i in range(5): report(loss=torch.tensor(0.25), step_size=i)
accelerator = Accelerator()
[batch] = accelerator.prepare(torch.utils.data.DataLoader(list(range(8)), batch_size=2)),
sum(len(x) for x in batch)""")
    assert f"rank {how.ranks - 1}  finished  epoch 1  step {8 // 2 // how.ranks}" in outcome.stdout
    assert "loss 0.25  step_size 4" in outcome.stdout


@pytest.mark.parametrize("how", SEVERAL, indirect=True)
def test_output_is_whole_and_in_order(done: Run, how: Way) -> None:
    outcome = done(f"""%%distributed -n 2 {how}
import sys
for i in range(3000): print("line", i, "x" * 50)
os.write(1, b"from C\\n")
sys.stdout.write("no newline at the end")
None""")
    for rank in range(2):
        mine = [line[4:] for line in kernels.unfolded(outcome.stdout) if line.startswith(f"{rank} │ ")]
        assert mine == [*(f"line {i} " + "x" * 50 for i in range(3000)), "from C", "no newline at the end"]


@pytest.mark.parametrize("how", ["spawn", RAY], indirect=True)
def test_panel_stands_under_the_cell_until_its_summary_does(
    notebook: kernels.Kernel, how: Way, tmp_path: pathlib.Path
) -> None:
    cell = notebook.start(f"""%%distributed -n 2 --view panel {how}
from notebook_accel import report
report(loss=0.25)
print("hello")
while not os.path.exists({str(tmp_path / "go")!r}): time.sleep(0.01)""")
    cell.wait_for_display()
    (tmp_path / "go").touch()
    panel, summary = (display["data"] for display in cell.finish().displays)
    assert "application/vnd.jupyter.widget-view+json" in panel
    assert "finished, 2 CPUs, " in summary["text/plain"]
    assert "0.25" in summary["text/html"] and "│ </span>hello" in summary["text/html"]
    assert {"0 │ hello", "1 │ hello"} <= set(kernels.unfolded(summary["text/plain"]))


@pytest.mark.parametrize("how", ["fork", RAY], indirect=True)
def test_stacks_name_the_users_line(run: Run, done: Run, how: Way) -> None:
    done(f"%%distributed -n 2 --background --out job --view none {how}\ntime.sleep(60)")
    done("while str(job.stacks()).count('time.sleep(60)') < 2: time.sleep(0.05)")
    assert run("sum('time.sleep(60)' in str(stack) for stack in job.stacks())").result == "2"
    done("job.stop()")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", RAY], indirect=True)
def test_killed_kernel_leaves_nothing_when_a_fork_of_it_lives(tmp_path: pathlib.Path, how: Way) -> None:
    """Beside a run by spawn. The fork, such as a library's worker, has the kernel's end of the agent's line."""
    deaf = """
import subprocess
child = subprocess.Popen(["sleep", "300"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up as", os.getpid(), child.pid, flush=True)
time.sleep(300)"""
    with kernels.running(tmp_path) as kernel:
        prepare(kernel)
        assert kernel.run(f"%%distributed -n 2 {how}\n1", FIRST_LAUNCH_S).result == "[1, 1]"
        living = int(kernel.value("""import ctypes
fork = ctypes.CDLL(None).fork  # not os.fork: so that nothing of ours is told about it
pid = fork()
if pid == 0:
    time.sleep(300); os._exit(0)
pid"""))  # fmt: skip
        kernel.run(f"%%distributed -n 2 --background --out job --view none\n{deaf}")
        shown = "job.logs(0) + job.logs(1)"
        kernel.run(f"while ({shown}).count('up as') < 2: time.sleep(0.05)")
        cell = kernel.start(f"%%distributed -n 2 {how}\n{deaf}")
        cell.wait_for_ranks("up as")
        of_ranks = [int(pid) for pid in " ".join(re.findall(r"up as (\d+ \d+)", cell.stream("stdout"))).split()]
        everything = {*kernel.descendants(), *filter(None, map(processes.read, of_ranks))}
        everything = {process for process in everything if process.pid != living}
        # Of each run two ranks with a child each, and agent and template.
        assert len(of_ranks) == 4 and len(everything) >= 10
        if "ray" in how.flags:  # Ray notices the kernel's end by its connections, which the fork has too
            os.kill(living, signal.SIGKILL)
        kernel.kill()
        try:
            processes.wait_until(lambda: not any(process.is_alive for process in everything), "all others are gone")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(living, signal.SIGKILL)


# fork ----------------------------------------------------------------------------------------------------------------


def test_forked_ranks_compute_after_the_kernel_has_with_all_its_threads(done: Run) -> None:
    """GNU's OpenMP hangs in a fork of a thread that has computed with several threads."""
    done(
        "torch.set_num_threads(4)\nbig = torch.rand(700, 700, requires_grad=True)\n"
        "((big @ big).exp() * 2).sum().backward()"
    )
    outcome = done("""%%distributed -n 2 --start_method fork --timeout_s 60
torch.set_num_threads(4)
leaf = torch.rand(700, 700, requires_grad=True)
((leaf @ big.detach()).sigmoid() * 2).sum().backward()
tuple(leaf.grad.shape)""")
    assert outcome.result == "[(700, 700), (700, 700)]"


def test_forked_ranks_have_what_cannot_be_sent_and_keep_what_they_change(run: Run, done: Run) -> None:
    done("import threading\nclass Odd: pass\nodd = Odd()\nodd.lock, numbers = threading.Lock(), [1]")
    assert "can't be sent" in run("%%distributed -n 2\nodd.lock.acquire()").traceback
    cell = "%%distributed -n 2 --start_method fork\nnumbers.append(2)\nodd.lock.acquire()"
    assert done(cell).result == "[True, True]"
    assert run("odd.lock.locked(), numbers").result == "(False, [1])"


def test_forked_ranks_share_a_model_without_copying_it(done: Run, notebook: kernels.Kernel) -> None:
    done("weights = torch.ones(64 << 20)  # 256 MiB")
    processes.wait_until(lambda: len(processes.children(notebook.pid)) == 1, "the fork of the run before is gone")
    before_bytes = processes.memory_bytes([notebook.process, *notebook.descendants()])
    cell = notebook.start("""%%distributed -n 4 --start_method fork
assert weights[:: 1 << 10].sum() == 1 << 16
print("has read", flush=True)
time.sleep(60)""")
    cell.wait_for_ranks("has read", 4)
    added_bytes = processes.memory_bytes([notebook.process, *notebook.descendants()]) - before_bytes
    notebook.interrupt()
    cell.finish()
    assert added_bytes < 256 << 20  # less than the model once more, in all
    done("del weights")


@pytest.mark.slow
def test_an_accelerator_of_the_notebook_is_refused_in_a_forked_rank_which_has_its_own(run: Run, done: Run) -> None:
    done("import notebook_accel\naccelerator = notebook_accel.Accelerator(cpu=True)")
    used = run("%%distributed -n 2 --start_method fork\naccelerator.num_processes")
    assert used.status == "error"
    assert re.search(r"This Accelerator was made in the notebook, and this is rank \d of 2, a fork", used.traceback)
    own = done("%%distributed -n 2 --start_method fork\nnotebook_accel.PartialState().num_processes")
    assert own.result == "[2, 2]"
    done("del accelerator")


def test_forked_ranks_hold_none_of_the_kernels_lines(done: Run) -> None:
    done("import socket\nlistener = socket.create_server(('127.0.0.1', 0))")
    done("mine = {os.readlink(e.path) for e in os.scandir('/proc/self/fd') if os.path.islink(e.path)}")
    outcome = done("""%%distributed -n 1 --start_method fork
held = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
sockets = [name for name in held if name.startswith("socket")]
[name for name in sockets if name in mine], len(sockets) > 0""")
    assert outcome.result == "[([], True)]"
    done("listener.close()")


@pytest.mark.slow
def test_what_is_registered_for_the_kernels_end_is_not_done_by_a_fork(done: Run, tmp_path: pathlib.Path) -> None:
    done(f"import atexit\nregistered = atexit.register(open, {str(tmp_path / 'ended')!r}, 'w')")
    done("%%distributed -n 2 --start_method fork\n1")
    done("atexit.unregister(registered)")
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["interrupt", "kill"])
def test_fork_that_hangs_at_its_birth(notebook: kernels.Kernel, done: Run, way: str) -> None:
    done("asleep = [True]\nos.register_at_fork(after_in_child=lambda: asleep and time.sleep(300))")
    standing = set(processes.children(notebook.pid))
    cell = notebook.start("%%distributed -n 2 --start_method fork\n1")
    [fork] = processes.wait_until(
        lambda: set(processes.children(notebook.pid)) - standing, "the kernel has forked itself"
    )
    cell.wait_for_output("Launching training")
    if way == "interrupt":
        notebook.interrupt()
        expected = "KeyboardInterrupt"
    else:  # as its agent does when it has waited too long
        os.kill(fork.pid, signal.SIGKILL)
        expected = "has not come to life"
    assert expected in cell.finish().traceback
    processes.wait_until(lambda: not fork.is_alive, "the fork is gone")
    done("asleep.clear()")
    assert done("%%distributed -n 2 --start_method fork\n1").result == "[1, 1]"


@pytest.mark.slow
def test_fork_beside_a_session_and_after_it(done: Run) -> None:
    """Forks close the session's descriptors once. In forks of theirs other files have the numbers."""
    done("from notebook_accel import notebook_launcher\ndef pid(): return os.getpid()")
    done("%distributed start -n 2")
    launch = 'len(set(notebook_launcher(pid, num_processes=2, start_method="fork")))'
    assert done(launch).result == "2"
    done("%distributed stop")
    assert done(launch).result == "2"
    done("%distributed start -n 2 --detach --name lab")
    done("%distributed detach")
    assert done(launch).result == "2"
    done("files = [open(os.devnull) for _ in range(20)]")
    cell = "%%distributed -n 2 --start_method fork\nsum(os.fstat(file.fileno()).st_size for file in files)"
    assert done(cell).result == "[0, 0]"
    done("for file in files: file.close()\nfrom notebook_accel import attach\nattach('lab').stop()")


@pytest.mark.slow
def test_fork_destroys_nothing_that_was_garbage_in_the_kernel(run: Run, done: Run, tmp_path: pathlib.Path) -> None:
    """A process group may be among it, whose end waits in a fork for threads that only the kernel has."""
    done(f"""import gc
class Garbage:
    def __init__(self): self.itself = self
    def __del__(self):
        if os.getpid() != kernel: open({str(tmp_path)!r} + f"/{{os.getpid()}}", "w").close()
kernel, is_making = os.getpid(), [True]
os.register_at_fork(
    before=lambda: is_making and os.getpid() == kernel and Garbage(),
    after_in_child=lambda: is_making and gc.set_threshold(1),  # collects as soon as it may
)""")
    assert done("%%distributed -n 1 --start_method fork\ngc.isenabled()").result == "[True]"
    assert run("is_making.clear(); gc.isenabled()").result == "True"
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_fork_that_is_killed_takes_its_ranks_along(notebook: kernels.Kernel, done: Run) -> None:
    processes.wait_until(lambda: len(processes.children(notebook.pid)) == 1, "the fork of the run before is gone")
    standing = set(processes.children(notebook.pid))
    cell = notebook.start("%%distributed -n 2 --start_method fork\nprint('up', flush=True)\ntime.sleep(60)")
    cell.wait_for_ranks("up")
    [fork] = set(processes.children(notebook.pid)) - standing
    ranks = processes.descendants(fork.pid)
    os.kill(fork.pid, signal.SIGKILL)
    outcome = cell.finish()
    assert outcome.error_name == "SupervisorLostError" and "has died, and the ranks with it" in outcome.traceback
    processes.wait_until(lambda: not any(rank.is_alive for rank in ranks), "the ranks are gone")
    assert done("%%distributed -n 2 --start_method fork\n1").result == "[1, 1]"


# inline --------------------------------------------------------------------------------------------------------------


def test_inline_is_this_process_with_the_notebooks_own_objects(run: Run, done: Run) -> None:
    done("box, here = [], os.getpid()")
    assert done("%%distributed --start_method inline\nbox.append(1)\ninside = os.getpid()").result == ""
    assert run("box, inside == here").result == "([1], True)"
    done("""from notebook_accel import notebook_launcher
def give(): return box
results = notebook_launcher(give, start_method="inline")""")
    assert run("results[0] is box, len(results)").result == "(True, 1)"


def test_fork_has_no_connection_of_an_inline_run(done: Run) -> None:
    make_group = "import torch.distributed as dist\ndist.init_process_group('gloo')\ndist.destroy_process_group()"
    done(f"%%distributed --start_method inline\n{make_group}")
    cell = "%%distributed -n 2 --start_method fork\ngiven = [os.open('/dev/null', os.O_RDONLY) for _ in range(50)]"
    assert "TCPStore" not in done(cell).stdout


def test_debugger_works_inline(run: Run, notebook: kernels.Kernel) -> None:
    traced = "%%distributed --start_method inline\nsecret = 41\nimport pdb; pdb.set_trace()\nsecret + 1"
    cell = notebook.start(traced, allow_stdin=True)
    assert "pdb" in cell.answer("p secret * 100")
    cell.wait_for_output("4100")
    assert "pdb" in cell.answer("c")
    assert cell.finish().result == "[42]"
    cell = notebook.start(traced, allow_stdin=True)
    assert "pdb" in cell.answer("q")
    outcome = cell.finish()
    assert outcome.error_name == "KeyboardInterrupt"
    assert "BdbQuit" not in outcome.traceback
    assert "by quit in the debugger" in run("%distributed status").stdout


def test_debugger_after_a_failure_begins_where_it_happened(run: Run, notebook: kernels.Kernel) -> None:
    run("%%distributed --start_method inline\ndef deep(depth): return 1 / depth\ndeep(0)")
    cell = notebook.start("%debug", allow_stdin=True)
    assert "pdb" in cell.answer("p 'depth is', depth")
    cell.wait_for_output("('depth is', 0)")
    cell.answer("q")
    assert cell.finish().status == "ok"


def test_inline_leaves_no_thread_descriptor_or_variable(run: Run, done: Run) -> None:
    look = "(sorted(os.environ), len(os.listdir('/proc/self/fd')), sorted(t.name for t in threading.enumerate()))"
    done("import threading\ndef go(): return torch.distributed.is_initialized()")
    call = "notebook_launcher(go, start_method='inline', view='none')"
    done(f"from notebook_accel import notebook_launcher\n{call}\nbefore = {look}")
    done(f"try: notebook_launcher(lambda: 1 / 0, start_method='inline', view='none')\nexcept Exception: pass\n{call}")
    assert run(f"before == {look}").result == "True", run(f"before, {look}").result
