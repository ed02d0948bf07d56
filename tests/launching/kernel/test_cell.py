"""Which names a cell needs, what it defines, and what it may not do."""

from __future__ import annotations

import builtins
import re

import pytest

from notebook_accel.errors import CellError
from notebook_accel.launching import spec
from notebook_accel.launching.kernel import cell


@pytest.mark.parametrize(("source", "uses"), [
    ("model", ("model",)),
    ("x = 1\nx", ()),
    ("x = x + 1", ("x",)),
    ("import torch\ntorch.ones(n)", ("n",)),
    ("net, opt = prepare(model, opt)\nnet", ("prepare", "model", "opt")),
    ("if flag:\n    x = 1\nx", ("flag", "x")),
    ("if flag:\n    x = 1\nelse:\n    x = 2\nx", ("flag",)),
    ("for i in items:\n    loss = f(i)\nfloat(loss)", ("items", "f")),
    ("for i in items:\n    best = max(best, i)", ("items", "best")),
    ("while flag:\n    x = 1\nx", ("flag", "x")),
    ("with open_it() as file:\n    y = file\ny", ("open_it",)),
    ("import contextlib\nwith contextlib.suppress(KeyError) as s:\n    y = int(z)\ny, s", ("y", "z")),
    ("from contextlib import suppress\ny = 1\nwith suppress(KeyError):\n    del y\n    z = 2\ny, z", ("y", "z")),
    ("try:\n    x = risky()\nexcept E as error:\n    print(error)\nx", ("risky", "E", "x")),
    ("def f(a): return a + g + h\ng = 1\nf(2)", ("g", "h")),
    ("class C(Base):\n    def m(self): return helper", ("Base", "helper")),
    ("[a for a in b]", ("b",)),
    ("lambda a: a + c", ("c",)),
    ("f'{value:.2f}'", ("value",)),
    ("del x", ("x",)),
    ("match command:\n    case [a, b]:\n        a + c\n    case Point(x=0):\n        pass", ("command", "c", "Point")),
    ("(n := 3)\nn", ()),
    ("print(len(x), In, _, get_ipython())", ("x",)),
    ("async def f():\n    return await y", ("y",)),
    ("x: int = 3\nx", ()),
    ("a.b = c\na[i] += d", ("a", "c", "i", "d")),
    ("for i in items:\n    if i: break\n    if not i: continue\n    loss = i\nloss", ("items",)),
    ("input.sum() + id", ("input", "id")),
    ("global_name = 1\ndef f():\n    global counter\n    counter = counter + 1", ("counter",)),
])  # fmt: skip
def test_names_that_come_from_the_notebook(source: str, uses: tuple[str, ...]) -> None:
    found = [name for name in cell.parse(source, "In[1]").uses if name in uses or not hasattr(builtins, name)]
    assert sorted(found) == sorted(uses)


def test_builtins_are_captured_only_where_the_notebook_has_its_own() -> None:
    parsed = cell.parse("input, id, len", "In[1]")
    assert parsed.captured({"input": 3, "id": id, "len": "mine"}) == {"input": 3, "len": "mine"}


def test_submodules_that_the_cell_reaches_are_named() -> None:
    parsed = cell.parse("xml.dom.minidom.parseString(text)", "In[1]")
    import xml.dom.minidom

    assert "xml.dom.minidom" in parsed.submodules({"xml": xml, "text": ""})
    assert cell.parse("xml", "In[1]").submodules({"xml": xml}) == ()


def test_captured_takes_what_the_notebook_has_and_what_is_pushed() -> None:
    parsed = cell.parse("model + missing", "In[1]")
    assert parsed.captured({"model": 1, "hidden": 2, "other": 3}, ["hidden"]) == {"model": 1, "hidden": 2}
    with pytest.raises(CellError, match="no name 'gone'"):
        parsed.captured({"model": 1}, ["gone"])


def test_pulled_name_has_to_be_one_that_the_cell_knows() -> None:
    parsed = cell.parse(
        "import os as o\nmodel = f(net)\ndef g():\n    global counter\n    counter = local = 1", "In[1]"
    )
    parsed.refuse_unknown(["model", "net", "o", "g", "counter", "hidden"], ["hidden"])
    with pytest.raises(CellError, match="pull model"):
        parsed.refuse_unknown(["modle"], [])
    cell.parse("from math import *", "In[1]").refuse_unknown(["pi"], [])


def test_final_async_def_is_refused_since_no_rank_would_run_it() -> None:
    with pytest.raises(CellError, match=r"asyncio.run\(train\(...\)\)"):
        cell.parse("import asyncio\nasync def train(): pass", "In[1]").refuse_async_end()
    cell.parse("async def train(): pass\nasyncio.run(train())", "In[1]").refuse_async_end()


@pytest.mark.parametrize(("definition", "args", "said"), [
    ("def f(): pass", (), ""),
    ("def f(a, b=1, *, c=2): pass", (1,), ""),
    ("def f(*a, **k): pass", (1, 2), ""),
    ("@decorated\ndef f(a): pass", (), ""),  # which may give it any arguments
    ("def f(a): pass\nf(1)", (), ""),
    ("def f(a, b): pass", (), "`def f(a, b)`, so each rank calls f: a, b would have no value"),
    ("def f(a, /, b, c=3): pass", (1,), ": b would have no value"),
    ("def f(*, key): pass", (), ": key would have no value"),
    ("def f(a): pass", (1, 2), ": 2 arguments are too many"),
])  # fmt: skip
def test_final_def_needs_its_arguments(definition: str, args: tuple[int, ...], said: str) -> None:
    parsed = cell.parse(definition, "In[1]")
    if not said:
        parsed.refuse_arguments(args)
        return
    with pytest.raises(CellError, match=re.escape(said)) as caught:
        parsed.refuse_arguments(args)
    assert "--args" in caught.value.fix


@pytest.mark.parametrize(("definition", "missing"), [
    ("def f(a, /, b, c=3, *, d, e=5): pass", (["a", "b"], ["d"])),
    ("def f(a=1, *b, **c): pass", ([], [])),
    ("@decorated\ndef f(a): pass", ([], [])),
    ("def f(a): pass\nf(1)", ([], [])),
])  # fmt: skip
def test_parameters_without_a_value_are_known(definition: str, missing: tuple[list[str], list[str]]) -> None:
    assert cell.parse(definition, "In[1]").without_value() == missing


def test_final_def_is_what_is_called() -> None:
    assert cell.parse("x = 1\ndef train(): pass", "In[1]").calls == "train"
    assert cell.parse("def train(): pass\ntrain()", "In[1]").calls == ""


def test_definitions_are_what_workers_need() -> None:
    source = "import os\nN: int = 3\nx = f()\nclass A: pass\ndef g(): return 1\nif N:\n    import re\nelse: pass"
    namespace: dict[str, object] = {}
    for code in spec.definitions(source, "In[1]"):
        exec(code, namespace)
    assert sorted(name for name in namespace if not name.startswith("__")) == ["A", "N", "g", "os", "re"]


@pytest.mark.parametrize("source", ["x = = 1", "return 3", "def f(:", "'abc"])
def test_what_is_not_python_is_a_syntax_error_that_names_the_cell(source: str) -> None:
    with pytest.raises(SyntaxError) as caught:
        cell.parse(source, "In[7]")
    assert caught.value.filename == "In[7]"
    assert (caught.value.text or "").rstrip("\n") == source  # which the notebook shows


def test_await_says_what_to_write_instead() -> None:
    with pytest.raises(SyntaxError, match=r"asyncio\.run") as caught:
        cell.parse("import asyncio\nawait asyncio.sleep(1)", "In[7]")
    assert (caught.value.lineno, caught.value.text) == (2, "await asyncio.sleep(1)")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("get_ipython().run_line_magic('timeit', '1')", "the magic %timeit needs the kernel"),
        ("x = 1\nget_ipython().show_usage()", r"line 2: \? alone explains IPython"),
        ("get_ipython().run_line_magic('pinfo', 'x.y')", r"line 1: x\.y\? needs the kernel"),
        ("get_ipython().run_line_magic('pinfo2', 'x.y')", r"line 1: x\.y\?\? needs the kernel"),
        ("get_ipython().run_line_magic('psearch', '*x*')", r"line 1: \*x\*\? needs the kernel"),
        ("x = get_ipython().run_cell_magic('time', '', 'y')", "%%time can't be used inside the cell"),
    ],
)
def test_magics_that_ranks_cannot_have_are_refused(source: str, said: str) -> None:
    with pytest.raises(CellError, match=said):
        cell.parse(source, "In[7]")


def test_empty_cell_is_refused() -> None:
    with pytest.raises(CellError, match="empty"):
        cell.parse("\n# only a comment\n", "In[7]")
