"""Tests of a session in a real notebook: cells run in it, variables are copied both ways, nothing is lost silently."""

from __future__ import annotations

import ast
import itertools
import pathlib
import re

import pytest

from kernel_ext import arguments
from kernel_ext.session_magics import _names_parser, parse_ranks
from tests import kernels
from tests.kernel_ext.conftest import error, shown

pytestmark = pytest.mark.usefixtures("session")


@pytest.mark.front_end
def test_cells_run_in_the_session_and_show_their_values(notebook: kernels.Kernel) -> None:
    assert shown(notebook, "%%distributed\nstays = rank + 1\n6 * 7") == "ranks 0-1: 42"
    outcome = notebook.run("%%distributed\nprint('printed by', rank)\nstays")
    assert outcome.result == "rank 0: 1\nrank 1: 2"
    assert sorted(outcome.stdout.splitlines()) == ["  0 │ printed by 0", "  1 │ printed by 1"]
    assert shown(notebook, "%%rank 1\nstays * 10") == "rank 1: 20"
    assert shown(notebook, "%%distributed\npass") == ""
    assert shown(notebook, "'stays' in globals(), 'rank' in globals()") == "(False, False)"
    html = notebook.run("%%distributed\nclass Table:\n    def _repr_html_(self): return '<b>table</b>'\nTable()")
    assert "Table object" in html.result


@pytest.mark.slow
def test_modules_that_change_are_reloaded_as_in_the_notebook_or_named(notebook: kernels.Kernel) -> None:
    def write(source: str) -> None:  # of another length: Python takes a file as unchanged by its second and its length
        assert notebook.run(f"open('helpers_of_mine.py', 'w').write({source!r})").status == "ok"

    write("def answer(): return 1")
    notebook.run("import helpers_of_mine\nfrom helpers_of_mine import answer")
    uses = "%%distributed\nanswer(), helpers_of_mine.answer()"
    assert shown(notebook, uses) == "ranks 0-1: (1, 1)"
    write("def answer(): return 22")
    outcome = notebook.run(uses)
    assert outcome.result == "ranks 0-1: (1, 1)"
    assert re.fullmatch(r"0-1 │ \[.*/helpers_of_mine.py has changed, but the ranks keep .*\]\n", outcome.stdout)
    assert notebook.run(uses).stdout == ""  # once
    notebook.run("%load_ext autoreload\n%autoreload 2")
    assert shown(notebook, uses) == "ranks 0-1: (22, 22)"
    for number in (333, 4444):
        write(f"def answer(): return {number}")
        assert shown(notebook, uses) == f"ranks 0-1: ({number}, {number})"
    write("def answer(: return 5")
    outcome = notebook.run(uses)
    assert outcome.result == "ranks 0-1: (4444, 4444)"
    assert "0-1 │ SyntaxError" in outcome.stdout
    notebook.run("%autoreload 0")
    notebook.run("open('later_of_mine.py', 'w').write('VALUE = 1')")
    # The clock of files is coarse, so the time of the change is set by hand.
    imports = """import later_of_mine, os, pathlib, time
pathlib.Path(later_of_mine.__file__).write_text('VALUE = 22')
os.utime(later_of_mine.__file__, (time.time() + 5, time.time() + 5))"""
    assert notebook.run(f"%%rank 1\n{imports}").stdout == ""
    kept = "_of_mine.py has changed, but the ranks keep the module"
    assert f"later{kept}" in notebook.run("%%rank 1\nlater_of_mine.VALUE").stdout
    # A push imports the module in the ranks, and it changes before the next cell.
    notebook.run("open('pushed_of_mine.py', 'w').write('class Thing: pass')")
    notebook.run("import pushed_of_mine\nthing = pushed_of_mine.Thing()\n%push thing")
    notebook.run("open('pushed_of_mine.py', 'w').write('class Thing: size = 22')")
    assert f"pushed{kept}" in notebook.run("%%distributed\nthing").stdout


def test_displays_and_figures_appear_under_the_cell_that_runs(notebook: kernels.Kernel) -> None:
    cell = notebook.start("""%%distributed
from IPython.display import HTML, clear_output
for number in range(2):
    print("before", number)
    display(HTML(str(number)))
handle = display(HTML("here"), display_id=True)
print("after")""")
    outcome = cell.finish()
    assert outcome.status == "ok", outcome
    order = []
    for message in cell.messages:
        content = message["content"]
        if message["msg_type"] == "stream":
            order += [line[4:] for line in kernels.unfolded(content["text"]) if line.startswith("0 │ ")]
        elif message["msg_type"] == "display_data":
            order.append(content["data"]["text/html"])
    assert order == ["before 0", "0", "before 1", "1", "here", "after"]
    assert "1 │ <IPython.core.display.HTML object>" in outcome.stdout
    # A later cell changes what it has a handle of, and clears only what is its own.
    later = notebook.run("%%distributed\nclear_output()\nhandle.update(HTML('changed')) if rank == 0 else None")
    assert [content["data"]["text/html"] for content in later.displays] == ["changed"]
    draw = "%%distributed\nimport matplotlib.pyplot as plt\n"
    drawn = notebook.run(draw + "_ = plt.plot([1, 2]); plt.show()\nfigure, axes = plt.subplots()")
    assert [list(content["data"]) for content in drawn.displays] == [["text/plain", "image/png"]] * 2


@pytest.mark.slow
def test_values_are_shown_in_the_richest_form_that_ranks_share(notebook: kernels.Kernel) -> None:
    def data(body: str) -> dict[str, str]:
        cell = notebook.start(f"%%distributed\nfrom IPython.display import HTML, Markdown\n{body}")
        assert cell.finish().status == "ok"
        return dict(next(m["content"]["data"] for m in cell.messages if m["msg_type"] == "execute_result"))

    assert data("HTML(f'<b>{rank}</b>')")["text/html"] == "<div>rank 0:</div><b>0</b><div>rank 1:</div><b>1</b>"
    mixed = data("HTML('<b>x</b>') if rank == 0 else '<y>'")
    assert mixed["text/html"] == "<div>rank 0:</div><b>x</b><div>rank 1:</div><pre>&#x27;&lt;y&gt;&#x27;</pre>"
    assert data("import matplotlib.pyplot as plt\nfigure = plt.figure()\nplt.close()\nfigure")["text/html"].startswith(
        '<div>ranks 0-1:</div><img src="data:image/png;base64,iVBOR'
    )
    assert data("Markdown('*m*')")["text/markdown"] == "*m*"
    assert data("rank") == {"text/plain": "rank 0: 0\nrank 1: 1"}


@pytest.mark.front_end
def test_names_of_the_notebook_are_there_without_a_word(notebook: kernels.Kernel) -> None:
    notebook.run("rate, words = 0.5, ['a']\ndef halved(x): return x * rate")
    assert shown(notebook, "%%distributed\nhalved(4), words") == "ranks 0-1: (2.0, ['a'])"
    assert shown(notebook, "%%distributed\nwords.append(rank)\nwords") == "rank 0: ['a', 0]\nrank 1: ['a', 1]"
    assert shown(notebook, "words") == "['a']"
    # What a rank has changed in place stays, until the notebook's own is another one.
    assert shown(notebook, "%%rank 0\nwords") == "rank 0: ['a', 0]"
    notebook.run("rate = 0.25")
    outcome = notebook.run("%%distributed\nhalved(4), len(words)")
    assert outcome.result == "ranks 0-1: (1.0, 2)"
    assert outcome.stderr == "Sent again after a change in the notebook: rate\n"
    notebook.run("words.append('b')")
    assert shown(notebook, "%%distributed\nwords") == "ranks 0-1: ['a', 'b']"


def test_what_a_cell_has_assigned_is_the_ranks_own(notebook: kernels.Kernel) -> None:
    notebook.run("limit = 1\ndef get_limit(): return limit")
    assert shown(notebook, "%%distributed\nlimit = 2\nget_limit()") == "ranks 0-1: 2"
    notebook.run("limit = 3\ndef get_twice(): return 2 * limit")
    assert shown(notebook, "%%distributed\nlimit, get_limit(), get_twice()") == "ranks 0-1: (2, 2, 4)"
    assert shown(notebook, "limit") == "3"
    notebook.run("%push limit")
    assert shown(notebook, "%%distributed\nlimit, get_limit()") == "ranks 0-1: (3, 3)"


def test_function_that_a_cell_ends_with_is_the_notebooks_too(notebook: kernels.Kernel) -> None:
    define = "import fractions\ndef third(x, *, of=3): return str(fractions.Fraction(x, of))"
    outcome = notebook.run(f"%%distributed\n{define}")
    assert outcome.stdout == "third wasn't called: third(x) in a cell like this calls it in the ranks.\n"
    assert notebook.run("%%distributed\nthird(10)").result == "ranks 0-1: '10/3'"
    assert notebook.run("third(10)").result == "'10/3'"
    outcome = notebook.run("%%distributed\nonly_there = rank + 1\ndef fourth(x=only_there): return x")
    assert (outcome.stdout, outcome.stderr) == ("", "")


@pytest.mark.front_end
def test_pull_binds_and_says_what_is_not_there(notebook: kernels.Kernel) -> None:
    notebook.run("%%distributed\nlosses = torch.tensor([float(rank)])")
    notebook.run("%pull losses")
    assert shown(notebook, "losses") == "tensor([0.])"
    notebook.run("%pull losses --rank 1")
    assert shown(notebook, "losses") == "tensor([1.])"
    assert "name 'missing' is not defined" in error(notebook, "%pull missing")
    assert "The notebook has no name 'missing'" in error(notebook, "%push missing")
    notebook.run("%%distributed --out values --pull losses\nrank * 2")
    assert shown(notebook, "values, losses") == "([0, 2], tensor([0.]))"


@pytest.mark.parametrize("line", ["first second", "first,second", "first, second"])
def test_names_are_written_as_for_the_flags_or_as_words(line: str) -> None:
    given = _names_parser("%pull").parse(arguments.split(f"{line} --rank 1", "%pull"))
    assert ([*itertools.chain(*given.names)], given.rank) == (["first", "second"], [1])


@pytest.mark.slow
def test_name_that_cannot_be_pulled_loses_no_other(notebook: kernels.Kernel, tmp_path: pathlib.Path) -> None:
    (tmp_path / "of_the_ranks.py").write_text("class Held: pass\n")
    notebook.run(f"""%%distributed
import sys
sys.path.append({str(tmp_path)!r})
import of_the_ranks
held, endless, net = of_the_ranks.Held(), (x for x in [rank]), torch.nn.Linear(60, 60)
sgd = torch.optim.SGD(net.parameters())""")
    said = error(notebook, "%pull held endless net sgd --rank 1")
    assert 'name "held" of rank 1 can\'t be unpickled here: ModuleNotFoundError' in said
    assert 'name "endless" of rank 1 can\'t be sent to another process: it is a generator' in said
    assert "Pulled all the same: net, sgd" in said
    assert shown(notebook, "sgd.param_groups[0]['params'][0] is net.weight, 'held' in globals()") == "(True, False)"
    said = error(notebook, "%%distributed --out values --pull net\nnet.weight.data.zero_()\nheld if rank else 5")
    assert "the result of rank 1 can't be unpickled here" in said
    assert shown(notebook, "import sys\nsys.last_value.values, int(net.weight.count_nonzero())") == "({0: 5}, 0)"


def test_name_that_only_some_ranks_have_is_an_error_that_offers_push(notebook: kernels.Kernel) -> None:
    notebook.run("%%rank 0\nshare = 1")
    notebook.run("share = 5")
    said = error(notebook, "%%distributed\nshare")
    assert "rank 1 of 2 failed" in said and "NameError" in said
    assert "the notebook has a 'share', and rank 1 has none: %push share" in said
    notebook.run("%push share --rank 1")
    assert shown(notebook, "%%distributed\nshare") == "rank 0: 1\nrank 1: 5"
    notebook.run("hidden = 8")
    assert "%push hidden" in error(notebook, "%%distributed\neval('hidden')")


@pytest.mark.front_end
def test_error_shows_the_cells_lines_and_the_session_goes_on(notebook: kernels.Kernel) -> None:
    said = error(notebook, "%%distributed\nimport time\nif rank == 1:\n    raise ValueError('mine')\ntime.sleep(100)")
    assert re.search(r"rank 1 of 2 failed at In\[\d+\], line 4: ValueError: mine", said)
    assert "raise ValueError('mine')" in said and "rank 0: stopped" in said
    assert "session_magics.py" not in said
    assert shown(notebook, "%%distributed\nrank") == "rank 0: 0\nrank 1: 1"


@pytest.mark.front_end
def test_interrupt_ends_the_cell_and_keeps_the_state(notebook: kernels.Kernel) -> None:
    cell = notebook.start("%%distributed\nimport time\nkept = rank\nprint('sleeps'); time.sleep(100)")
    cell.wait_for_output("0 │ sleeps")
    cell.wait_for_output("1 │ sleeps")
    notebook.interrupt()
    outcome = cell.finish()
    assert outcome.error_name == "KeyboardInterrupt"
    assert "the cell was interrupted on all ranks, which keep their variables" in outcome.traceback
    assert re.search(r"rank 1 was at In\[\d+\], line 4", outcome.traceback)
    assert shown(notebook, "%%distributed\nkept") == "rank 0: 0\nrank 1: 1"


@pytest.mark.front_end
def test_tab_and_question_mark_know_what_rank_0_has(notebook: kernels.Kernel) -> None:
    notebook.run("%%distributed\nclass Item:\n    'Something.'\n    colour = 'red'\nitem_of_ranks = Item()")
    # Who types waits less long for rank 0 than this machine may need; who runs a cell with a question mark waits.
    notebook.run("from notebook_accel.sessions.kernel import rank_pool as _pool\n_pool._LOOKUP_DEADLINE_S = 60.0")

    def offered(body: str, first: str = "%%distributed") -> list[str]:
        code = f"{first}\n{body}"
        reply = notebook.value(f"get_ipython().kernel.do_complete({code!r}, {len(code)})['matches']")
        return list(ast.literal_eval(reply))

    assert "item_of_ranks" in offered("x = item_of")
    assert "item_of_ranks.colour" in offered("item_of_ranks.col", "%%rank 0")
    assert "item_of_ranks" not in offered("item_of", "%%distributed --fresh")
    assert "item_of_ranks" not in offered("item_of", "%%time")
    notebook.run("notebooks_own = 1")
    assert "notebooks_own" in offered("notebooks_o")
    code = "%%distributed\nitem_of_ranks.colour"
    told = notebook.value(f"get_ipython().kernel.do_inspect({code!r}, {len(code) - 2})['data']['text/plain']")
    assert "Value: 'red'" in ast.literal_eval(told)
    assert notebook.run("%%distributed\nitem_of_ranks?").stdout == "Type: Item\nDocstring:\nSomething.\n"
    assert notebook.run("%%distributed\n?nothing").stdout == "Rank 0 has no name 'nothing'.\n"
    assert notebook.run("%%rank 0\nitem_of_ranks?").stdout == "Type: Item\nDocstring:\nSomething.\n"
    assert "only rank 0 can be asked for item_of_ranks?" in notebook.run("%%rank 0-1\nitem_of_ranks?").stderr
    notebook.run("_pool._LOOKUP_DEADLINE_S = 0.0")
    assert notebook.run("%%distributed\nitem_of_ranks?").stdout == "Type: Item\nDocstring:\nSomething.\n"


def test_fresh_cell_is_a_launch_of_its_own(notebook: kernels.Kernel) -> None:
    notebook.run("%%distributed\nmine = 1")
    outcome = notebook.run("%%distributed --fresh -n 1 --use_cpu\n'mine' in globals()")
    assert outcome.result == "[False]", outcome
    assert shown(notebook, "%%distributed\nmine") == "ranks 0-1: 1"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("%%distributed -n 3\n1", "--num_processes can't be used with a cell in a session"),
        ("%%distributed --background --pull rank\n1", "--pull can't be used with a cell in the background"),
        ("%distributed debug 0-1", "%distributed debug takes one rank at a time"),
        ("%distributed debug 2", "The session has no rank 2"),
        ("%%rank 2\n1", "The session has no rank 2: it has ranks 0 to 1"),
        ("%%rank\n1", "%%rank needs ranks"),
        ("%%rank one\n1", "'one' names no ranks"),
        ("%pull rank --rank 0-1", "%pull copies from one rank"),
        ("%push rate --nonsense 3", "%push: there is no option --nonsense"),
        ("%%distributed --detach\n1", "--detach goes with --fresh here"),
        ("%distributed start -n 2", "There is a session already"),
        ("%distributed begin", "there is no command 'begin'; there are status, stop"),
    ],
)
def test_what_cannot_be_is_said_in_a_few_lines(notebook: kernels.Kernel, code: str, said: str) -> None:
    shown_text = error(notebook, code)
    assert said in shown_text
    assert len(shown_text.strip().splitlines()) <= 4


def test_which_ranks() -> None:
    assert parse_ranks(" 0,2-3 ") == [0, 2, 3]
    assert parse_ranks("5, 1") == [1, 5]
