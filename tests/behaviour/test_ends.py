"""However a run ends: the right error, nothing left, and the next launch works."""

from __future__ import annotations

import os
import pathlib
import re
import signal

import pytest

from tests import kernels, processes
from tests.launches import RAY, Way

RANK = "int(os.environ['RANK'])"
WORKS = "%%distributed -n 2\nint(os.environ['RANK'])"
on_every_engine = pytest.mark.parametrize(
    "how", ["spawn", pytest.param("fork", marks=pytest.mark.slow), RAY], indirect=True
)
on_both_engines = pytest.mark.parametrize("how", ["spawn", RAY], indirect=True)


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
    outcome = notebook.run(f"""%%distributed -n 2 {how}
print("before it")
def deep(rank):
    if rank == 1:
        raise ValueError("boom")
    time.sleep(1000)
deep({RANK})""")
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


def test_an_error_of_the_library_ends_at_the_users_line(notebook: kernels.Kernel) -> None:
    outcome = notebook.run("""%%distributed -n 1
from notebook_accel import Accelerator
Accelerator().load_state("nowhere")""")
    assert 'Accelerator().load_state("nowhere")' in outcome.traceback
    assert "CheckpointError" in outcome.traceback
    assert "notebook_accel/training" not in outcome.traceback


@on_every_engine
def test_interrupt_ends_ranks_that_ignore_it(notebook: kernels.Kernel, how: Way) -> None:
    cell = notebook.start(f"""%%distributed -n 2 --grace_s 0.2 {how}
signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
time.sleep(60)""")
    cell.wait_for_ranks("deaf")
    notebook.interrupt()
    assert cell.finish().error_name == "KeyboardInterrupt"
    assert_nothing_of_the_run_is_left(notebook)


def test_exit_in_the_users_code(notebook: kernels.Kernel) -> None:
    assert "SystemExit: 3" in notebook.run("%%distributed -n 1\nimport sys\nsys.exit(3)").traceback
    assert notebook.run("%%distributed -n 2\nimport sys\nsys.exit()").status == "ok"


@on_both_engines
def test_timeout_ends_the_run_and_says_so(notebook: kernels.Kernel, how: Way) -> None:
    outcome = notebook.run(f"%%distributed -n 2 --timeout_s 0.5 {how}\ntime.sleep(60)")
    assert (outcome.error_name, "timeout_s of 0.5 s" in outcome.traceback) == ("RunTimeoutError", True)
    assert_nothing_of_the_run_is_left(notebook)


@on_both_engines
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
    notebook.run("os.remove('rows0'), os.remove('packed0')")
    assert notebook.run(f"%%distributed -n 1 {how}\n{LEFT_OPEN}\n1 / 0").error_name == "RankFailedError"
    assert notebook.run(READ).result == "[('1,2\\n', 'text'), ('1,2\\n', 'text')]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "awaited"),
    [
        (
            "class Waits:\n    def __del__(self): time.sleep(60)\nwaits = Waits()",
            "objects that it destroys, such as open files",
        ),
        (
            "import threading\nthreading.Thread(target=time.sleep, args=(60,), name='uploading').start()",
            "its threads uploading",
        ),
    ],
    ids=["finalizer", "thread"],
)
def test_what_a_rank_still_does_at_its_exit_is_shown_and_can_be_interrupted(
    notebook: kernels.Kernel, tmp_path: pathlib.Path, last: str, awaited: str
) -> None:
    notebook.run(f"weights, folder = 0, {str(tmp_path)!r}\nos.chdir(folder)")
    cell = notebook.start(f"%%distributed -n 2 --pull weights {LEFT_OPEN}\nweights = 1\n{last}")
    cell.wait_for_output(f"waits at most a minute for {awaited}. Interrupt to end it")
    notebook.interrupt()
    assert cell.finish().error_name == "KeyboardInterrupt"
    assert rank_processes(notebook) == []
    assert notebook.run("weights").result == "1"
    assert notebook.run(READ).result == "[('1,2\\n', 'text'), ('1,2\\n', 'text')]"


@pytest.mark.slow
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


@pytest.mark.slow
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
    def __bool__(self): raise SystemExit("no text")
    __class__ = property(__str__)
with tempfile.TemporaryDirectory() as folder: os.chdir(folder)
raise Broken()""")
    assert "rank 0 of 1 failed at In[" in outcome.traceback and "Broken" in outcome.traceback
    notebook.run("""from notebook_accel import notebook_launcher, RankFailedError
def fail():
    error = ValueError("text"); error.lock = __import__("threading").Lock(); raise error
try: notebook_launcher(fail, num_processes=1, view="none")
except RankFailedError as error: caught = error.__cause__""")
    assert notebook.run("type(caught).__name__, str(caught)").result == "('ValueError', 'text')"


def test_workers_of_a_failed_rank_go_with_it(notebook: kernels.Kernel) -> None:
    cell = "%%distributed -n 1\nimport subprocess\nsubprocess.Popen(['sleep', '300'])"
    assert "RankFailedError" in notebook.run(f"{cell}\nraise ValueError('done')").traceback
    processes.wait_until(lambda: rank_processes(notebook) == [], "the rank's own child is gone")
    assert [process for process in notebook.descendants() if "sleep" in str(process)] == []


@on_both_engines
def test_background_job_can_be_stopped(notebook: kernels.Kernel, how: Way) -> None:
    notebook.run(f"%%distributed -n 2 --background --out job --view none {how}\ntime.sleep(60)")
    assert notebook.run("job.status in ('starting', 'running')").result == "True"
    assert "RunTimeoutError" in notebook.run("job.results(timeout_s=0.1)").traceback
    notebook.run("job.stop()\njob.wait(20)")
    assert notebook.run("job.status, type(job.error).__name__").result == "('stopped', 'RunStoppedError')"
    assert_nothing_of_the_run_is_left(notebook)


def test_killed_agent_is_reported_and_replaced(notebook: kernels.Kernel) -> None:
    cell = notebook.start("%%distributed -n 2\nprint('up', flush=True)\ntime.sleep(60)")
    cell.wait_for_output("1 │ up")
    ranks = rank_processes(notebook)
    os.kill(agent_of(notebook).pid, signal.SIGKILL)
    assert cell.finish().error_name == "SupervisorLostError"
    processes.wait_until(lambda: not any(rank.is_alive for rank in ranks), "the ranks are gone")
    assert notebook.run(WORKS, 120).result == "[0, 1]"
