"""Detached sessions in notebooks: a kernel that is killed, and another one that takes the session over."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Iterator

import pytest

from notebook_accel.launching import run_folders
from notebook_accel.launching.kernel import detached, detached_runs
from tests import kernels, processes
from tests.kernel_ext.conftest import assert_ready, error, shown

pytestmark = pytest.mark.usefixtures("state_home")

_LONG_S = 100.0


@contextlib.contextmanager
def notebook(folder: pathlib.Path, lists: str = "") -> Iterator[kernels.Kernel]:
    """A kernel with the extension, which detached sessions have no template of. Loading it must print ``lists``."""
    folder.mkdir()
    with kernels.running(folder) as kernel:
        loaded = kernel.run(f"%load_ext notebook_accel\n{kernels.END_TEMPLATE}", _LONG_S)
        assert loaded.status == "ok" and re.search(lists, loaded.stdout), loaded
        yield kernel


def attach(kernel: kernels.Kernel, name: str = "'lab'") -> kernels.Outcome:
    attached = kernel.run(f"%distributed attach {name}", _LONG_S)
    assert attached.status == "ok", attached.traceback
    assert attached.stdout.startswith(f"<Session {name}: 2 of 2 ranks are there, on 2 CPUs>\n"), attached
    return attached


def debug(kernel: kernels.Kernel, *commands: str) -> str:
    """Answer the debugger's questions with these commands; what it says."""
    cell = kernel.start("%distributed debug", allow_stdin=True)
    for command in commands:
        assert cell.answer(command) == "rank 1 (Pdb) "
    return cell.finish(_LONG_S).stdout


# Two kernels and ranks of their own: the only notebook test of %distributed attach and detach of a session.
def test_session_outlives_its_kernel_and_another_one_goes_on_with_it(tmp_path: pathlib.Path) -> None:
    with notebook(tmp_path / "first") as first:
        started = first.run("%distributed start -n 2 --use_cpu --detach --name lab", 180)
        assert_ready(started)
        assert started.stdout.endswith("They outlive this kernel: %distributed attach lab finds them again.\n")
        first.run("%%distributed\nimport os, time\nrank = int(os.environ['RANK'])\nkept = [rank]", _LONG_S)
        first.run("class Model:\n    def double(self): return 2 * self.size\nlr = 0.1")
        assert shown(first, "%%distributed\nmodel = Model()\nmodel.size = rank + lr\nmodel.double()") == (
            "rank 0: 0.2\nrank 1: 2.2"
        )
        assert "ZeroDivisionError" in error(first, "%%distributed\nnobody = 1 - rank\nrank / nobody")
        first.kill()
    [folder] = run_folders.every()
    processes.wait_until(lambda: detached_runs.summary(folder).session == "idle", "all that was said is kept", _LONG_S)
    going = r"detached run of yours goes on: lab \(a session on 2 CPUs, idle since \d{4}-"
    with notebook(tmp_path / "second", going) as second:
        [row] = second.run("%distributed runs").stdout.splitlines()[1:]
        assert re.match(r"lab +session, idle +\d{4}-\d\d-\d\d \d\d:\d\d +", row), row
        assert "has failed on rank 1]\n" in attach(second).stderr
        assert "nobody = 0\n" in debug(second, "p f'nobody = {nobody}'", "q").replace("'", "")
        assert second.value("get_ipython().kernel.do_complete('%%distributed\\nmodel.dou', 23)['matches']") == (
            "['model.double']"
        )
        assert "There is a session already" in error(second, "%distributed attach lab")
        assert (
            shown(second, "%%distributed\nkept, model.double(), lr")
            == "rank 0: ([0], 0.2, 0.1)\nrank 1: ([1], 2.2, 0.1)"
        )
        assert shown(second, "%pull model --rank 1\nmodel.double()") == "2.2"
        second.run("lr = 0.3")
        changed = second.run("%%distributed\nlr")
        assert changed.result == "ranks 0-1: 0.3"
        assert changed.stderr == "Sent again after a change in the notebook: lr\n"
        assert second.run("%distributed status").stdout.startswith("1 (lab): running, on 2 CPUs; ")
        assert "Rank 1 has restarted" in second.run("%distributed restart 1", _LONG_S).stdout
        left = second.run("%distributed detach").stdout
        assert left == "This notebook has left the session, which goes on. %distributed attach lab finds it again.\n"
        assert "needs a session" in error(second, "%%rank 0\nkept")
        attach(second)
        assert second.run("%unload_ext notebook_accel", _LONG_S).status == "ok"  # leaves it, too
        assert second.run(f"%load_ext notebook_accel\n{kernels.END_TEMPLATE}", _LONG_S).status == "ok"
        attach(second)
        assert shown(second, "%%rank 0\nkept") == "rank 0: [0]"
        assert "name 'kept' is not defined" in error(second, "%%rank 1\nkept")
        assert second.run("%distributed stop", _LONG_S).stdout == "The session has ended.\n"
        processes.wait_until(lambda: not folder.is_held, "its agent has gone", _LONG_S)
        assert second.run("%distributed runs --clean").stdout.startswith("Removed: ")
    assert list(run_folders.root().iterdir()) == []


@pytest.mark.slow
def test_usual_session_is_detached_by_name(tmp_path: pathlib.Path) -> None:
    with notebook(tmp_path / "first") as first:
        first.run("%distributed start -n 2 --use_cpu", _LONG_S)
        first.run("%%distributed\nimport os\nkept = os.environ['RANK']")
        left = first.run("%distributed detach 'our lab'").stdout
        assert left.endswith("which goes on. %distributed attach 'our lab' finds it again.\n")
        assert first.run("%distributed status").stdout.startswith("1 (session): detached")
        # It is free for another one, which gets a free name.
        assert_ready(first.run("%distributed start -n 2 --use_cpu", _LONG_S))
        folder, lock = run_folders.make("session")
        left = first.run("%distributed detach").stdout
        assert left.endswith("which goes on. %distributed attach session-2 finds it again.\n")
        os.close(lock)
        folder.remove()
        detached.stop(run_folders.find("session-2"))
        first.kill()
    with notebook(tmp_path / "second") as second:
        attach(second, "'our lab'")
        assert shown(second, "%%distributed\nkept") == "rank 0: '0'\nrank 1: '1'"
        assert second.run("%distributed stop", _LONG_S).stdout == "The session has ended.\n"
