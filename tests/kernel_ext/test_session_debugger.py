"""``%distributed debug``: pdb at a rank's last error, in the notebook."""

from __future__ import annotations

import re

import pytest

from tests import kernels
from tests.kernel_ext.conftest import error, shown

pytestmark = pytest.mark.usefixtures("session")

_FAILING = """%%distributed
def divided(total, by):
    share = total / by
    return share
divided(10 + rank, 1 - rank) if rank == 1 else None"""


def debug(notebook: kernels.Kernel, *commands: str, line: str = "%distributed debug 1") -> kernels.Outcome:
    """Answers each question of the debugger with the next command."""
    cell = notebook.start(line, allow_stdin=True)
    for command in commands:
        assert re.fullmatch(r"rank \d \(Pdb\) ", cell.answer(command))
    return cell.finish()


@pytest.mark.front_end
def test_nothing_has_failed_yet(notebook: kernels.Kernel) -> None:
    assert "Nothing has failed in this session yet" in error(notebook, "%distributed debug")
    assert "Nothing has failed on rank 0 yet" in error(notebook, "%distributed debug 0")


@pytest.mark.front_end
def test_commands_go_to_the_rank_and_its_answers_come_back(notebook: kernels.Kernel) -> None:
    notebook.run("%%distributed\nkept = [rank]")
    assert "ZeroDivisionError" in error(notebook, _FAILING)
    outcome = debug(notebook, "p total, by", "l", "print('printed')", "kept.append('seen')", "u", "p share", "q")
    assert outcome.status == "ok", outcome
    said = outcome.stdout
    assert re.search(r"> In\[\d+\]\(3\)divided\(\)\n-> share = total / by\n", said)
    assert "(11, 0)" in said and "  4  \t    return share" in said and "\nprinted\n" in said
    assert re.search(r"> In\[\d+\]\(5\)<module>\(\)", said) and "NameError: name 'share' is not defined" in said
    # Nothing has happened to the other rank, and the session goes on.
    assert shown(notebook, "%%distributed\nkept") == "rank 0: [0]\nrank 1: [1, 'seen']"
    # By default the rank that failed last, and its error stays until the next one.
    assert "-> share = total / by" in debug(notebook, "continue", line="%distributed debug").stdout


def test_error_that_this_package_raises_is_looked_at_from_the_users_line(notebook: kernels.Kernel) -> None:
    error(notebook, "%%rank 1\nwanted = 'this'\nimport notebook_accel\nnotebook_accel.skip_first_batches(wanted, 1)")
    said = debug(notebook, "p wanted", "down", "q").stdout
    assert re.match(r"> In\[\d+\]\(4\)<module>\(\)\n", said) and "'this'" in said
    assert "/notebook_accel/training/" in said


def test_end_of_input_and_an_interrupt_end_it(notebook: kernels.Kernel) -> None:
    error(notebook, _FAILING)
    assert debug(notebook, "EOF").status == "ok"
    at_prompt = notebook.start("%distributed debug 1", allow_stdin=True)
    at_prompt.wait_for_question()
    notebook.interrupt()
    assert at_prompt.finish().status == "ok"
    computing = notebook.start("%distributed debug 1", allow_stdin=True)
    computing.answer("os.write(1, b'sleeps\\n'), time.sleep(100)")
    computing.wait_for_output("1 │ sleeps")
    notebook.interrupt()
    assert computing.finish().status == "ok"
    assert shown(notebook, "%%distributed\nrank") == "rank 0: 0\nrank 1: 1"


def test_where_nobody_can_be_asked_it_says_so(notebook: kernels.Kernel) -> None:
    error(notebook, _FAILING)
    assert "nobody can type them here" in error(notebook, "%distributed debug 1")
    assert shown(notebook, "%%distributed\nrank") == "rank 0: 0\nrank 1: 1"


@pytest.mark.slow
def test_rank_keeps_what_failed_until_its_next_error(notebook: kernels.Kernel) -> None:
    alive = "%%rank 1\nimport gc, weakref\ngc.collect()\nwatched() is None"
    cell = "%%rank 1\nimport weakref\ndef fails():\n    global watched\n    held = torch.ones(10)\n"
    error(notebook, cell + "    watched = weakref.ref(held)\n    raise ValueError\nfails()")
    assert shown(notebook, alive) == "rank 1: False"
    error(notebook, "%%rank 1\nmisspelt")
    assert shown(notebook, alive) == "rank 1: True"
