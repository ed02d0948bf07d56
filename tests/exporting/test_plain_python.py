"""Source text is cut into statements, and IPython's calls become plain Python."""

from __future__ import annotations

import ast
import sys
from typing import Any

import pytest
from IPython.utils.text import DollarFormatter

from notebook_accel.errors import CellError
from notebook_accel.exporting import plain_python
from notebook_accel.exporting.plain_python import Body


@pytest.mark.parametrize(("call", "said"), [
    ("get_ipython().system('ls -l')", "_exit_code = subprocess.run('ls -l', shell=True).returncode"),
    ("x = get_ipython().getoutput('ls')", "x = subprocess.getoutput('ls').splitlines()"),
    ("é = 1; get_ipython().run_line_magic('cd', '~/data')", "é = 1; os.chdir(os.path.expanduser('~/data'))"),
    ("get_ipython().run_line_magic('env', 'A=b c')", "os.environ.update(A='b c')"),
    ("if x:\n    get_ipython().run_line_magic('matplotlib', 'inline')", "if x:\n    pass"),
])  # fmt: skip
def test_ipythons_calls_become_what_they_do_in_a_rank(call: str, said: str) -> None:
    assert plain_python.plain(call, "In[1]", ())[0] == said
    compile(said, "train.py", "exec")


def test_what_has_no_equal_in_python_is_named_with_its_line() -> None:
    with pytest.raises(CellError, match=r"In\[4\], line 12: %time is IPython's"):
        plain_python.plain("x = 1\n\nget_ipython().run_line_magic('time', 'x')", "In[4]", (), first_line=10)


@pytest.mark.parametrize("command", [
    "echo $out/* {out}",
    "echo $n.real {n + 1} {n!r:>3} '$n' $$n $$ {{n}}",
    "echo {words[0]} {words[1:]} {words['a']!r} {\"it's\"}",
    "echo $HOME {n}",
    "echo ${n}",
    "awk '{print $1}' {out}",
    "find . -exec ls {} +",
    "cp {out}{,.bak}",
    "echo {n",
    "echo 'a\\nb' \"c\" {n}",
    "echo {[k for k in words]}",
    "docker ps --format '{{.Names}}'",
    "echo {len(words)} $n",
    "echo plain",
])  # fmt: skip
def test_command_fills_in_what_ipython_fills_in(command: str) -> None:
    names = {"out": "a b", "n": 3, "words": _Words("xyz")}
    try:
        filled = DollarFormatter().vformat(command, [], names)
    except Exception:  # noqa: BLE001 - IPython runs the command as it is then
        filled = command
    source, _ = plain_python.plain(f"get_ipython().run_line_magic('env', {'A=' + command!r})", "In[1]", names)
    assert eval(source.replace("os.environ.update", "dict"), dict(names)) == {"A": filled}


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="f-strings have no limits there")
def test_expression_that_no_f_string_can_have_is_refused() -> None:
    command = """echo ''' \"\"\" {out['a']}"""
    with pytest.raises(CellError, match=r"In\[1\], line 1: an expression of the command can't be in an f-string"):
        plain_python.plain(f"get_ipython().system({command!r})", "In[1]", ["out"])


class _Words(list):  # type: ignore[type-arg]
    def __getitem__(self, key: Any) -> Any:
        return key if isinstance(key, str) else super().__getitem__(key)


def test_command_fills_in_names_that_are_known_where_it_stands() -> None:
    source = "def f(i):\n    get_ipython().system('echo $i')\nget_ipython().system('for i in 1 2; do echo $i; done')"
    assert plain_python.plain(source, "In[1]", ())[0] == (
        "def f(i):\n    _exit_code = subprocess.run(f'echo {i}', shell=True).returncode\n"
        "_exit_code = subprocess.run('for i in 1 2; do echo $i; done', shell=True).returncode"
    )


def test_magics_fill_in_names_too() -> None:
    source = "get_ipython().run_line_magic('cd', '$out')\nget_ipython().run_line_magic('env', 'A={out}')"
    assert plain_python.plain(source, "In[1]", ["out"])[0] == (
        "os.chdir(os.path.expanduser(f'{out}'))\nos.environ.update(A=f'{out}')"
    )


def test_shell_command_inside_an_expression_is_refused_since_its_value_is_none() -> None:
    with pytest.raises(CellError, match=r"In\[1\], line 1: get_ipython\(\)\.system is IPython's"):
        plain_python.plain("x = get_ipython().system('ls')", "In[1]", ())


def test_indenting_leaves_strings_as_they_are() -> None:
    source = 'x = """a\n b\nc"""\ny = f"""\n{x}\n"""\nif x:\n\n    z = (x +\n y)'
    values: dict[str, dict[str, object]] = {"plain": {}, "deeper": {}}
    exec(source, values["plain"])
    exec(f"if True:\n{plain_python.indented(source)}", values["deeper"])
    assert [values["plain"][name] for name in "xyz"] == [values["deeper"][name] for name in "xyz"]


def test_statements_have_their_comments() -> None:
    found = plain_python.statements("# far\n\n# near\n@decorator\ndef f(): pass\npass\na = 1; b = 2  # end\n")
    assert [statement.text for statement in found] == [
        "# near\n@decorator\ndef f(): pass",
        "a = 1; b = 2  # end",
    ]
    assert [statement.above for statement in found] == ["# far\n\n", ""]


@pytest.mark.parametrize(("source", "free", "guarded"), [
    ("import a\nclass C: pass\nx = C()", ["class C: pass"], "x = C()"),
    ("x = 1\ndef f(): return x", ["def f(): return x"], "x = 1"),
    ("x = 1\ndef f(y=x): pass", [], "x = 1\ndef f(y=x): pass"),
    ("start()\nclass C:\n    x = draw()", [], "start()\nclass C:\n    x = draw()"),
    ("def f(): pass\nf()\ndef f(): return 1", [], "def f(): pass\nf()\ndef f(): return 1"),
    ("f()\ndef f(): return 1", [], "f()\ndef f(): return 1"),
    ("x = 1\nx + 1", [], "x = 1\nprint(x + 1)"),
    ("a, b", [], "print((a, b))"),
    ("print(1)\n# the end", [], "print(1)\n# the end"),
])  # fmt: skip
def test_definitions_stand_free_where_that_changes_nothing(source: str, free: list[str], guarded: str) -> None:
    body = Body(source)
    assert (body.definitions, body.guarded) == (free, guarded)


def test_value_that_may_be_none_is_printed_unless_it_is() -> None:
    guarded = Body("result = 1\n# so\nf()").guarded
    assert (
        guarded == "result = 1\n# so\nresult_of_cell = f()\nif result_of_cell is not None:\n    print(result_of_cell)"
    )


def test_final_function_is_called_with_the_arguments() -> None:
    body = Body("def train(a, b): ...", "train", "(1, x[0])")
    assert body.guarded.startswith("result = train(1, x[0])\n")
    assert [ast.unparse(argument) for argument in body.arguments] == ["1", "x[0]"]
