"""The ranks' output, seen from a real kernel: a flood, a stopped agent, a full disk, a failure."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable

import pytest

from tests import kernels

Done = Callable[[str], kernels.Outcome]


def of_rank(rank: int, outcome: kernels.Outcome) -> list[str]:
    return [line[4:] for line in kernels.unfolded(outcome.stdout) if line.startswith(f"{rank} │ ")]


def test_flood_of_one_rank_shows_its_ends_and_leaves_the_other_rank_alone(done: Done) -> None:
    outcome = done("""%%distributed -n 2 --view lines
if os.environ["RANK"] == "0":
    for number in range(100_000): print("line", number, "x" * 100)
else:
    for number in range(20): print("calm", number); time.sleep(0.05)""")
    assert of_rank(1, outcome) == [f"calm {number}" for number in range(20)]
    flood = of_rank(0, outcome)
    assert flood[0].startswith("line 0 ") and flood[-1].startswith("line 99999 ")
    assert len(flood) < 10_000
    [gap] = [line for line in flood if "left out" in line]
    found = re.fullmatch(r"\[([\d,]+) lines left out here; the whole output is in (/.*/rank_0.log)\]", gap)
    assert found
    assert len(flood) - 1 + int(found[1].replace(",", "")) == 100_000
    with open(found[2]) as log:
        assert [line.split()[1] for line in log] == [str(number) for number in range(100_000)]


@pytest.mark.slow
def test_loggers_and_warnings_are_as_in_the_notebook(fresh_notebook: kernels.Kernel) -> None:
    fresh_notebook.run("""import logging, warnings
logging.basicConfig(level=logging.INFO, format="%(name)s says %(message)s")
log = logging.getLogger("mine")
def train(): log.info("hello")
warnings.filterwarnings("ignore", "the old")
old, new = 'the old way', 'the new way'""")
    outcome = fresh_notebook.run("%%distributed -n 1 --view none\nlist(logging.Logger.manager.loggerDict)")
    assert "'torch'" in outcome.result and "IPKernelApp" not in outcome.result  # the kernel's own
    for method in ("spawn", "fork"):
        cell = f"%%distributed -n 2 --view lines --start_method {method}\ntrain(); log.debug('much')"
        outcome = fresh_notebook.run(cell)
        assert [of_rank(rank, outcome) for rank in (0, 1)] == [["mine says hello"]] * 2
        assert outcome.stderr == ""  # the kernel's handler has written nothing
    fresh_notebook.run("""import logging.handlers, queue
listener = logging.handlers.QueueListener(queue.Queue(), logging.StreamHandler()); listener.start()
handlers, logging.root.handlers = logging.root.handlers, [logging.handlers.QueueHandler(listener.queue)]""")
    assert of_rank(1, fresh_notebook.run("%%distributed -n 2 --view lines\ntrain()")) == ["hello"]
    fresh_notebook.run("listener.stop(); logging.root.handlers = handlers")
    warn = "warnings.warn(old); warnings.warn(new)"
    outcome = fresh_notebook.run(f"%%distributed -n 1 --view lines\n{warn}")
    assert "UserWarning: the new way" in outcome.stdout and "the old way" not in outcome.stdout
    fresh_notebook.run("warnings.simplefilter('error')")  # counts before the earlier one
    fresh_notebook.run("%distributed start -n 2")
    assert of_rank(1, fresh_notebook.run("%%distributed\nlogging.warning('careful')")) == ["root says careful"]
    assert fresh_notebook.run(f"%%distributed\n{warn}").traceback.endswith("UserWarning: the old way")


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_launched_within_an_output_widget_is_shown_there(
    notebook: kernels.Kernel, done: Done, fails: bool
) -> None:
    done("""import ipywidgets, threading
from notebook_accel import notebook_launcher
def train(fails):
    print("from a rank")
    assert not fails, "on purpose"
def launch(fails):
    with out: notebook_launcher(train, (fails,), num_processes=2)
out = ipywidgets.Output(); out""")
    in_thread = "thread = threading.Thread(target=launch, args=(False,)); thread.start(); thread.join()"
    cell = notebook.start("launch(True)" if fails else f"launch(False); {in_thread}")
    assert cell.finish(100).status == "ok"
    seen: list[str] = []  # of the outputs that come while a front end captures them
    is_captured = False
    for message in cell.messages:
        content = message["content"]
        if message["msg_type"] == "comm_msg":
            is_captured = bool(content["data"].get("state", {}).get("msg_id", is_captured))
        elif message["msg_type"] in ("stream", "error"):
            assert is_captured, content
            seen.append(content.get("text") or content["evalue"])
    if fails:
        assert "AssertionError: on purpose" in seen[-1]
    else:
        assert sorted(line for line in kernels.unfolded("".join(seen)) if "from" in line) == [
            *["0 │ from a rank"] * 2,
            *["1 │ from a rank"] * 2,
        ]


def test_failure_names_the_log_of_its_rank(notebook: kernels.Kernel) -> None:
    outcome = notebook.run("""%%distributed -n 2
print("seen before the end")
os.write(2, b"from below")
if os.environ["RANK"] == "1": raise ValueError("boom")
time.sleep(60)""")
    found = re.search(r"^Its whole output: (/.*/rank_1\.log)$", outcome.traceback, re.MULTILINE)
    assert found, outcome.traceback
    assert pathlib.Path(found[1]).read_text() == "seen before the end\nfrom below"
    advice = re.search(r"^Next: (%distributed logs 1) shows more", outcome.traceback, re.MULTILINE)
    assert advice, outcome.traceback
    assert notebook.run(advice[1]).stdout.endswith("rank_1.log\nseen before the end\nfrom below\n")


def test_template_of_the_prefix_is_torchs(done: Done) -> None:
    template = "--log_line_prefix_template '[${role_name}:${rank}] '"
    outcome = done(f"%%distributed -n 2 {template}\nprint('hello', os.environ['RANK'])")
    assert sorted(line for line in outcome.stdout.splitlines() if "hello" in line) == [
        "[default_role:0] hello 0",
        "[default_role:1] hello 1",
    ]


@pytest.mark.slow
def test_workers_started_by_spawn_write_whole_lines(done: Done) -> None:
    done("def say(number):\n    print('worker', number, 'z' * 50)\n    return number")
    outcome = done("""%%distributed -n 1
import multiprocessing
with multiprocessing.get_context("spawn").Pool(2) as pool: sorted(pool.map(say, range(40), chunksize=1))""")
    assert sorted(of_rank(0, outcome)) == sorted(f"worker {number} " + "z" * 50 for number in range(40))


_WARNS = """
import warnings
from pathlib import Path
folder, rank = Path({folder!r}), int(os.environ["RANK"])
(folder / str(rank)).touch()
while len(list(folder.iterdir())) < 8: time.sleep(0.001)
warnings.warn({said!r})
print("of rank", rank)
None
"""


@pytest.mark.front_end
def test_what_eight_ranks_warn_alike_stands_once(done: Done, tmp_path: pathlib.Path) -> None:
    for attempt in range(10):  # on a busy machine, ranks come far apart
        (tmp_path / str(attempt)).mkdir()
        said = f"this is attempt {attempt}"
        outcome = done(
            "%%distributed -n 8 --view panel" + _WARNS.format(folder=str(tmp_path / str(attempt)), said=said)
        )
        text = outcome.displays[-1]["data"]["text/plain"]
        each = kernels.unfolded(text)
        for rank in range(8):  # nothing is lost, and nothing stands elsewhere
            mine = [line.partition("│ ")[2] for line in each if line.startswith(f"{rank} │ ")]
            assert mine[0].endswith(f"UserWarning: {said}") and mine[-1] == f"of rank {rank}"
            assert [line for line in mine if "UserWarning" in line] == mine[:1]
        lines = [line for line in text.splitlines() if line.endswith(f"UserWarning: {said}") and "│" in line]
        if len(lines) == 1:
            break
    assert len(lines) == 1 and lines[0].startswith("0-7 │ ")
    own = [line for line in text.splitlines() if "of rank" in line and "│" in line]
    assert sorted(own) == [f"  {rank} │ of rank {rank}" for rank in range(8)]
