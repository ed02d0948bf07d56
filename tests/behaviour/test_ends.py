"""However a run ends: the right error, nothing left, and the next launch works."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import time

import pytest

from tests import kernels, processes
from tests.launches import RAY, Way, prepare

RANK = "int(os.environ['RANK'])"
WORKS = "%%distributed -n 2\nint(os.environ['RANK'])"
on_every_engine = pytest.mark.parametrize("how", ["spawn", "fork", RAY], indirect=True)


def agent_of(kernel: kernels.Kernel) -> processes.Process:
    [agent] = [child for child in processes.children(kernel.pid) if processes.is_agent(child)]
    return agent


def rank_processes(kernel: kernels.Kernel) -> list[processes.Process]:
    """Ranks and what they started: all below a template, which is a child of the agent, or the kernel's own fork."""
    agent = agent_of(kernel)
    templates = {*processes.children(kernel.pid), *processes.children(agent.pid)} - {agent}
    return [process for template in templates for process in processes.descendants(template.pid)]


def assert_nothing_of_the_run_is_left(kernel: kernels.Kernel) -> None:
    assert rank_processes(kernel) == []
    processes.wait_until(lambda: len(processes.children(kernel.pid)) == 1, "a fork that ranks were forked from is gone")


@pytest.mark.front_end
@on_every_engine
def test_first_failure_ends_the_run_at_once_and_is_the_one_shown(notebook: kernels.Kernel, how: Way) -> None:
    started = time.monotonic()
    outcome = notebook.run(f"""%%distributed -n 2 {how}
print("before it")
def deep(rank):
    if rank == 1:
        raise ValueError("boom")
    time.sleep(60)
deep({RANK})""")
    assert time.monotonic() - started < 30  # not the 60 s of rank 0's sleep; a process's exit takes milliseconds
    assert (outcome.status, outcome.error_name) == ("error", "RankFailedError")
    for expected in (
        "rank 1 of 2",
        "ValueError: boom",
        'raise ValueError("boom")',
        "line 5",
        "before it",
        "rank 0: stopped",
    ):
        assert expected in outcome.traceback
    assert_nothing_of_the_run_is_left(notebook)
    assert notebook.run(WORKS).result == "[0, 1]"


def test_failure_in_a_notebook_function_shows_its_cells_source(notebook: kernels.Kernel) -> None:
    notebook.run("def inner(x):\n    return x / 0   # this very line")
    outcome = notebook.run("%%distributed -n 1\ninner(3)")
    assert "return x / 0   # this very line" in outcome.traceback
    assert "ZeroDivisionError" in outcome.traceback


def test_an_error_of_the_library_ends_at_the_users_line(notebook: kernels.Kernel) -> None:
    outcome = notebook.run("""%%distributed -n 1
from notebook_accel import Accelerator
Accelerator().load_state("nowhere")""")
    assert 'Accelerator().load_state("nowhere")' in outcome.traceback
    assert "CheckpointError" in outcome.traceback
    assert "notebook_accel/training" not in outcome.traceback


def test_the_ranks_exception_is_the_cause(notebook: kernels.Kernel) -> None:
    notebook.run("""from notebook_accel import notebook_launcher, RankFailedError
class Special(Exception): pass
def fail(): raise Special("mine", 3)
try: notebook_launcher(fail, num_processes=2, view="none")
except RankFailedError as error: caught = error""")
    assert notebook.run("type(caught.__cause__) is Special, caught.__cause__.args").result == "(True, ('mine', 3))"
    assert notebook.run("caught.rank in (0, 1), caught.world_size, caught.exit_code").result == "(True, 2, 1)"


@on_every_engine
def test_a_peers_lost_connection_is_not_reported_as_the_cause(notebook: kernels.Kernel, how: Way) -> None:
    outcome = notebook.run(f"""%%distributed -n 2 {how}
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if {RANK} == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(1))""")
    assert "rank 1 of 2 was killed by SIGKILL" in outcome.traceback


@pytest.mark.front_end
def test_interrupt_ends_every_rank_and_keeps_the_kernel(notebook: kernels.Kernel, tmp_path: pathlib.Path) -> None:
    notebook.run("kept = 'still here'")
    cell = notebook.start(f"""%%distributed -n 2
try:
    print("in the loop", flush=True)
    time.sleep(60)
finally:
    open(os.path.join({str(tmp_path)!r}, os.environ["RANK"]), "w").close()""")
    cell.wait_for_output("0 │ in the loop")
    cell.wait_for_output("1 │ in the loop")
    notebook.interrupt()
    outcome = cell.finish()
    assert (outcome.status, outcome.error_name) == ("error", "KeyboardInterrupt")
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]  # their `finally` ran
    assert "rank 0 was at In[" in outcome.traceback and "following.py" not in outcome.traceback
    assert rank_processes(notebook) == []
    assert notebook.run("kept").result == "'still here'"
    assert notebook.run(WORKS).result == "[0, 1]"


@on_every_engine
def test_interrupt_ends_ranks_that_ignore_it(notebook: kernels.Kernel, how: Way) -> None:
    cell = notebook.start(f"""%%distributed -n 2 --grace_s 0.2 {how}
signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)""")
    cell.wait_for_output("0 │ deaf")
    cell.wait_for_output("1 │ deaf")
    notebook.interrupt()
    assert cell.finish().error_name == "KeyboardInterrupt"
    assert_nothing_of_the_run_is_left(notebook)


@on_every_engine
def test_killed_rank_is_named_with_its_signal(notebook: kernels.Kernel, how: Way) -> None:
    cell = notebook.start(f"%%distributed -n 2 {how}\nprint('pid', os.getpid(), sep='=', flush=True)\ntime.sleep(60)")
    cell.wait_for_output("1 │ pid=")
    line = next(line for line in kernels.unfolded(cell.stream("stdout")) if line.startswith("1 │ pid="))
    os.kill(int(line.partition("=")[2]), signal.SIGKILL)
    outcome = cell.finish()
    assert "rank 1 of 2 was killed by SIGKILL" in outcome.traceback
    assert "rank 0: stopped" in outcome.traceback


def test_exit_in_the_users_code(notebook: kernels.Kernel) -> None:
    assert (
        "exited with status 7" in notebook.run(f"%%distributed -n 2\nif {RANK}: os._exit(7)\ntime.sleep(60)").traceback
    )
    assert "SystemExit: 3" in notebook.run("%%distributed -n 1\nimport sys\nsys.exit(3)").traceback
    assert notebook.run("%%distributed -n 2\nimport sys\nsys.exit()").status == "ok"


@on_every_engine
def test_timeout_ends_the_run_and_says_so(notebook: kernels.Kernel, how: Way) -> None:
    outcome = notebook.run(f"%%distributed -n 2 --timeout_s 0.5 {how}\ntime.sleep(60)")
    assert (outcome.error_name, "timeout_s of 0.5 s" in outcome.traceback) == ("RunTimeoutError", True)
    assert_nothing_of_the_run_is_left(notebook)


def test_timeout_says_where_the_ranks_stood(notebook: kernels.Kernel) -> None:
    outcome = notebook.run("%%distributed -n 2 --timeout_s 4\nx = 1\ntime.sleep(60)")
    assert "rank 0 was at In[" in outcome.traceback and "], line 3" in outcome.traceback


@on_every_engine
def test_what_was_to_be_pulled_survives_an_interrupt_and_a_failure(notebook: kernels.Kernel, how: Way) -> None:
    notebook.run("weights, step = torch.zeros(5000), 0")
    cell = notebook.start(f"""%%distributed -n 2 --pull weights,step {how}
weights += 1
step = 7
print("half done", flush=True)
time.sleep(60)""")
    cell.wait_for_output("0 │ half done")
    notebook.interrupt()
    outcome = cell.finish()
    assert "weights, step: pulled as it was then in rank 0" in outcome.traceback
    assert notebook.run("float(weights.mean()), step").result == "(1.0, 7)"
    outcome = notebook.run(
        f"%%distributed -n 1 --pull weights,late {how}\nweights += 1\nif weights.sum(): raise ValueError\nlate = 1"
    )
    assert "Pulled all the same, as it was then in rank 0: weights" in outcome.traceback
    assert float(notebook.run("float(weights.mean())").result) == 2.0


@on_every_engine
@pytest.mark.parametrize("waiting", ["time.sleep(60)", "dist.barrier()"])
def test_what_was_to_be_pulled_survives_the_failure_of_another_rank(
    notebook: kernels.Kernel, how: Way, waiting: str
) -> None:
    outcome = notebook.run(f"""%%distributed -n 2 --pull trained {how}
import torch.distributed as dist
trained = {RANK} + 5
dist.init_process_group("gloo")  # so that both ranks have come here
if {RANK} == 1: raise ValueError("boom")
{waiting}""")
    assert outcome.error_name == "RankFailedError" and "boom" in outcome.traceback
    assert "Pulled all the same, as it was then in rank 0: trained" in outcome.traceback
    assert notebook.run("trained").result == "5"


def test_what_rank_0_could_not_save_is_named(notebook: kernels.Kernel) -> None:
    outcome = notebook.run(f"""%%distributed -n 2 --pull trained --grace_s 0.5
import signal
trained = 5
if {RANK} == 1:
    while not os.path.exists("deaf"): time.sleep(0.01)
    raise ValueError("boom")
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
open("deaf", "w").close()
while True: time.sleep(1)""")
    assert "boom" in outcome.traceback
    assert "trained: rank 0 was ended before it could send them" in outcome.traceback


@on_every_engine
def test_what_cannot_be_pulled_hides_neither_the_failure_nor_the_interrupt(
    notebook: kernels.Kernel, how: Way, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "of_the_ranks.py").write_text("class Held: pass\n")
    notebook.run("held, lock, weights = None, None, torch.zeros(5000)")
    cell = f"""%%distributed -n 2 --pull held,lock,weights {how}
import sys, threading
sys.path.append({str(tmp_path)!r})
import of_the_ranks
held, lock = of_the_ranks.Held(), threading.Lock()
weights += 1
print("made", flush=True)
if {RANK} == FAILING: raise ValueError("boom")
time.sleep(60)"""
    outcome = notebook.run(cell.replace("FAILING", "0"))
    assert (outcome.error_name, "ValueError: boom" in outcome.traceback) == ("RankFailedError", True)
    started = notebook.start(cell.replace("FAILING", "-1"))
    started.wait_for_output("0 │ made")
    notebook.interrupt()
    interrupted = started.finish()
    assert interrupted.error_name == "KeyboardInterrupt"
    for said, pulled in (
        (outcome, "Pulled all the same, as it was then in rank 0: weights"),
        (interrupted, "weights: pulled as it was then in rank 0"),
    ):
        assert pulled in said.traceback
        assert 'name "held" of rank 0 can\'t be unpickled here: ModuleNotFoundError' in said.traceback
        assert 'name "lock" of rank 0 can\'t be sent to another process: it is a lock' in said.traceback
    assert notebook.run("float(weights.mean()), held, lock").result == "(2.0, None, None)"


@on_every_engine
def test_failed_ranks_own_threads_do_not_delay_the_end(notebook: kernels.Kernel, how: Way) -> None:
    started = time.monotonic()
    outcome = notebook.run(f"""%%distributed -n 2 {how}
import threading
if {RANK}:
    threading.Thread(target=time.sleep, args=(60,)).start()
    raise ValueError("boom")
time.sleep(60)""")
    assert time.monotonic() - started < 30  # neither the thread's 60 s nor rank 0's
    assert "rank 1 of 2 failed" in outcome.traceback and "rank 0: stopped" in outcome.traceback


def test_what_a_rank_still_does_at_its_exit_is_shown_and_can_be_interrupted(notebook: kernels.Kernel) -> None:
    notebook.run("weights = 0")
    cell = notebook.start("""%%distributed -n 2 --pull weights
import threading
weights = 1
threading.Thread(target=time.sleep, args=(60,), name="uploading").start()""")
    cell.wait_for_output("waits at most a minute for its threads uploading. Interrupt to end it now.")
    notebook.interrupt()
    assert cell.finish().error_name == "KeyboardInterrupt"
    assert rank_processes(notebook) == []
    assert notebook.run("weights").result == "1"


LEFT_OPEN = """
import csv, gzip
rows = open(f"{folder}/rows{RANK}", "w")
csv.writer(rows).writerow([1, 2])
packed = gzip.open(f"{folder}/packed{RANK}", "wt")
packed.write("text")
""".replace("{RANK}", f"{{{RANK}}}")
READ = "import gzip\n[(open(f'rows{n}').read(), gzip.open(f'packed{n}', 'rt').read()) for n in range(2)]"


@on_every_engine
def test_files_that_are_left_open_are_whole_when_the_cell_returns(
    notebook: kernels.Kernel, how: Way, tmp_path: pathlib.Path
) -> None:
    notebook.run(
        f"folder = {str(tmp_path)!r}\nos.chdir(folder)\nopened_here = open('of_kernel', 'w'); opened_here.write('once')"
    )
    outcome = notebook.run(f"%%distributed -n 2 {how}\n{LEFT_OPEN}\nopened_here = packed")
    assert outcome.status == "ok", outcome.traceback
    assert notebook.run(READ).result == "[('1,2\\n', 'text'), ('1,2\\n', 'text')]"
    assert notebook.run("opened_here.close(); open('of_kernel').read()").result == "'once'"  # no rank has written it


@pytest.mark.parametrize("is_interrupted", [False, True], ids=["failed", "interrupted"])
def test_files_that_a_run_leaves_open_that_ends_early_are_whole(
    notebook: kernels.Kernel, tmp_path: pathlib.Path, is_interrupted: bool
) -> None:
    notebook.run(f"folder = {str(tmp_path)!r}\nos.chdir(folder)")
    then = "print('open', flush=True); time.sleep(60)" if is_interrupted else "raise ValueError('boom')"
    cell = notebook.start(f"%%distributed -n 1\n{LEFT_OPEN}\n{then}")
    if is_interrupted:
        cell.wait_for_output("0 │ open")
        notebook.interrupt()
    assert cell.finish().error_name == ("KeyboardInterrupt" if is_interrupted else "RankFailedError")
    assert notebook.run(READ.replace("range(2)", "range(1)")).result == "[('1,2\\n', 'text')]"


def test_a_finalizer_that_takes_long_is_named_and_can_be_interrupted(
    notebook: kernels.Kernel, tmp_path: pathlib.Path
) -> None:
    notebook.run(f"folder = {str(tmp_path)!r}\nos.chdir(folder)")
    cell = notebook.start(f"""%%distributed -n 2 {LEFT_OPEN}
class Waits:
    def __del__(self): time.sleep(60)
waits = Waits()""")
    cell.wait_for_output("waits at most a minute for objects that it destroys, such as open files. Interrupt to end it")
    notebook.interrupt()
    assert cell.finish().error_name == "KeyboardInterrupt"
    assert rank_processes(notebook) == []
    assert notebook.run(READ).result == "[('1,2\\n', 'text'), ('1,2\\n', 'text')]"


def test_result_waits_for_a_checkpoint_in_the_background(notebook: kernels.Kernel, tmp_path: pathlib.Path) -> None:
    outcome = notebook.run(f"""%%distributed -n 2
import torch
from notebook_accel import Accelerator
from notebook_accel.training import model_files
accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(2, 2))
def write_object(*args):
    raise OSError("no space left")
model_files.write_object = write_object
accelerator.save_state({str(tmp_path / "state")!r}, async_=True)""")
    assert "which was saved while training went on, failed:" in outcome.traceback
    assert "no space left" in outcome.traceback


def test_rank_that_goes_on_after_the_grace_is_named_as_that(notebook: kernels.Kernel) -> None:
    outcome = notebook.run(f"""%%distributed -n 2 --grace_s 0.2
signal.signal(signal.SIGTERM, signal.SIG_IGN)
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if {RANK}: raise ValueError("boom")
time.sleep(60)""")
    assert "rank 0: stopped by SIGKILL, since it went on after the grace" in outcome.traceback


@on_every_engine
def test_crash_in_native_code_shows_the_line_of_python(notebook: kernels.Kernel, how: Way) -> None:
    outcome = notebook.run(
        f"%%distributed -n 1 {how}\nimport ctypes\ndef reads_nothing():\n    ctypes.string_at(0)\nreads_nothing()"
    )
    assert "was killed by SIGSEGV" in outcome.traceback and "Native code has crashed" in outcome.traceback
    assert re.search(
        r'Traceback of rank 0:\n.*string_at\n  File "In\[\d+\]", line 4 in reads_nothing\n', outcome.traceback
    )
    of_memory = re.search(r"this rank had used up to \d+ MiB, and there is 1 rank", outcome.traceback)
    assert (of_memory is not None) is ("fork" in how.flags)


def test_repeated_stops_do_not_postpone_the_kill(notebook: kernels.Kernel) -> None:
    cell = "%%distributed -n 1 --background --out deaf --view none --grace_s 1"
    notebook.run(cell + "\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(60)")
    notebook.run("deadline = time.monotonic() + 30\nwhile deaf.status == 'starting': time.sleep(0.05)")
    notebook.run("while not deaf.done and time.monotonic() < deadline: deaf.stop(); time.sleep(0.1)")
    assert notebook.run("deaf.status, time.monotonic() < deadline").result == "('stopped', True)"


def test_what_one_rank_garbles_ends_no_other_run(notebook: kernels.Kernel) -> None:
    notebook.run("%%distributed -n 1 --background --out other --view none\ntime.sleep(2)\n'fine'")
    outcome = notebook.run("""%%distributed -n 1
from tqdm.auto import tqdm
from notebook_accel import report
from notebook_accel.reporting import reporter
for i in tqdm(range(3), total=12.5): report(loss=10**400)
class Odd:
    def _repr_html_(self): return b"bytes"
display(Odd())
reporter()._connection.send(b"no event at all")
'done'""")
    assert outcome.result == "['done']", outcome.traceback
    assert notebook.run("other.results(timeout_s=30)").result == "['fine']"


def test_exception_that_cannot_be_described_or_sent_is_reported_all_the_same(notebook: kernels.Kernel) -> None:
    outcome = notebook.run("""%%distributed -n 1
import tempfile, threading
class Broken(Exception):
    def __init__(self): self.lock = threading.Lock()
    def __str__(self): raise TypeError("no text")
with tempfile.TemporaryDirectory() as folder: os.chdir(folder)
raise Broken()""")
    assert "rank 0 of 1 failed at In[" in outcome.traceback and "Broken" in outcome.traceback
    notebook.run("""from notebook_accel import notebook_launcher, RankFailedError
def fail():
    error = ValueError("text"); error.lock = __import__("threading").Lock(); raise error
try: notebook_launcher(fail, num_processes=1, view="none")
except RankFailedError as error: caught = error.__cause__""")
    assert notebook.run("type(caught).__name__, str(caught)").result == "('ValueError', 'text')"


@pytest.mark.parametrize("method", ["spawn", "inline"])
@pytest.mark.parametrize("name", ["__bool__", "__str__", "__repr__", "__getattribute__", "__reduce__", "__class__"])
def test_exception_whose_own_method_raises_is_reported_all_the_same(
    notebook: kernels.Kernel, method: str, name: str
) -> None:
    make = "property(no)" if name == "__class__" else "no"
    outcome = notebook.run(f"""%%distributed -n 1 --start_method {method}
def no(*args): raise SystemExit("no text") if not args else TypeError("no text")
class Broken(Exception): {name} = {make}
raise Broken("the text")""")
    assert outcome.error_name == "RankFailedError"
    assert re.search(r"rank 0 of 1 failed at In\[\d+\], line 4: Broken", outcome.traceback), outcome.traceback


@pytest.mark.parametrize("change", ["sys.stdout = None", "del sys.stdout, sys.stderr", "sys.stdout.close()"])
def test_streams_that_a_cell_takes_away_fail_nothing(notebook: kernels.Kernel, change: str) -> None:
    outcome = notebook.run(f"%%distributed -n 2\nimport sys\n{change}\n{RANK}")
    assert outcome.result == "[0, 1]", outcome.traceback
    assert "Traceback" not in outcome.stdout
    outcome = notebook.run(f"%%distributed -n 1\nimport sys\n{change}\nraise ValueError('its own reason')")
    assert "line 4: ValueError: its own reason" in outcome.traceback


def test_backspaces_in_the_output_move_the_cursor(notebook: kernels.Kernel) -> None:
    outcome = notebook.run("%%distributed -n 1\nprint('10%', end='\\b\\b\\b', flush=True)\nprint('20%')")
    assert "0 │ 20%" in kernels.unfolded(outcome.stdout)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_of_a_failed_rank_go_with_it(notebook: kernels.Kernel, method: str) -> None:
    cell = f"%%distributed -n 1 --start_method {method}\nimport subprocess\nsubprocess.Popen(['sleep', '300'])"
    assert "RankFailedError" in notebook.run(f"{cell}\nraise ValueError('done')").traceback
    processes.wait_until(lambda: rank_processes(notebook) == [], "the rank's own child is gone")
    assert [process for process in notebook.descendants() if "sleep" in str(process)] == []


@on_every_engine
def test_background_job_can_be_stopped(notebook: kernels.Kernel, how: Way) -> None:
    notebook.run(f"%%distributed -n 2 --background --out job --view none {how}\ntime.sleep(60)")
    assert notebook.run("job.status in ('starting', 'running')").result == "True"
    assert "RunTimeoutError" in notebook.run("job.results(timeout_s=0.1)").traceback
    notebook.run("job.stop()\njob.wait(20)")
    assert notebook.run("job.status, type(job.error).__name__").result == "('stopped', 'RunStoppedError')"
    assert_nothing_of_the_run_is_left(notebook)


@pytest.mark.front_end
def test_ipythons_own_display_reaches_the_notebook(notebook: kernels.Kernel) -> None:
    outcome = notebook.run(
        "%%distributed -n 1\nfrom IPython.display import HTML, display as show\nshow(HTML('<b>here</b>'))"
    )
    assert [content["data"]["text/html"] for content in outcome.displays] == ["<b>here</b>"], outcome.traceback


def test_killed_agent_is_reported_and_replaced(notebook: kernels.Kernel) -> None:
    cell = notebook.start("%%distributed -n 2\nprint('up', flush=True)\ntime.sleep(60)")
    cell.wait_for_output("1 │ up")
    ranks = rank_processes(notebook)
    os.kill(agent_of(notebook).pid, signal.SIGKILL)
    assert cell.finish().error_name == "SupervisorLostError"
    processes.wait_until(lambda: not any(rank.is_alive for rank in ranks), "the ranks are gone")
    assert notebook.run(WORKS, 120).result == "[0, 1]"


def test_killed_template_is_reported_and_replaced(notebook: kernels.Kernel) -> None:
    cell = notebook.start("%%distributed -n 2\nprint('up', flush=True)\ntime.sleep(60)")
    cell.wait_for_output("1 │ up")
    [template] = [child for child in processes.children(agent_of(notebook).pid) if processes.is_template(child)]
    os.kill(template.pid, signal.SIGKILL)
    outcome = cell.finish()
    assert "has died" in outcome.traceback
    assert notebook.run(WORKS, 120).result == "[0, 1]"


def test_unloading_stops_what_runs_and_takes_the_magic_away(notebook: kernels.Kernel) -> None:
    notebook.run("%%distributed -n 2 --background --out job --view none\ntime.sleep(60)")
    assert notebook.run("%unload_ext notebook_accel").status == "ok"
    assert notebook.descendants() == []
    assert notebook.run("job.done, job.status").result == "(True, 'stopped')"
    assert "distributed" in notebook.run("%%distributed -n 1\n1").stderr
    prepare(notebook)  # it can be loaded again


def test_changed_import_time_variable_gets_a_new_template(notebook: kernels.Kernel) -> None:
    read = "%%distributed -n 1\nimport torch\nos.environ.get('PYTORCH_JIT'), os.getppid()"
    before = notebook.run(read).result
    assert notebook.run(read).result == before
    notebook.run("os.environ['PYTORCH_JIT'] = '1'")
    after = notebook.run(read, 120).result
    notebook.run("del os.environ['PYTORCH_JIT']")
    assert "'1'" in after
    assert after.split(",")[1] != before.split(",")[1]
    processes.wait_until(lambda: len(notebook.descendants()) == 2, "the old template is gone")
