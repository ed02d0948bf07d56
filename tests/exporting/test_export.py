"""Scripts that are exported from sources, and what they print."""

from __future__ import annotations

import pathlib
import runpy
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, NotebookAccelError
from notebook_accel.exporting.export import ExportRequest, export
from notebook_accel.launching.kernel import cell as cells


class Notebook:
    """A notebook without a kernel: its cells as IPython translates them, and their names, which are ``__main__``'s."""

    def __init__(self, folder: pathlib.Path, names: dict[str, Any]) -> None:
        self.path = folder / "train.py"
        self._names = names
        self._cells = [""]

    def run(self, *sources: str) -> None:
        for source in sources:
            self._cells.append(TransformerManager().transform_cell(source))
            code = compile(self._cells[-1], f"In[{len(self._cells) - 1}]", "exec", dont_inherit=True)
            exec(code, self._names)

    def export(self, cell: str, args: str | None = None, **options: Any) -> str:
        """Return the script of a cell."""
        source = TransformerManager().transform_cell(cell)
        parsed = cells.parse(f"\n{source}", f"In[{len(self._cells)}]")
        given = {name: options.pop(name) for name in list(options) if name in LaunchConfig.__struct_fields__}
        config = LaunchConfig(num_processes=2).replace(**given)
        request = ExportRequest(**{"path": self.path, "options": config, "given": given, "args": args, **options})
        export(parsed, request, self._names, self._cells)
        return request.path.read_text()


@pytest.fixture
def notebook(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return Notebook(tmp_path, vars(main))


@pytest.fixture
def run(notebook: Notebook, capfd: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Returns the lines that a cell's script prints."""

    def script(cell: str, args: str | None = None) -> list[str]:
        notebook.export(cell, args, overwrite=True)
        capfd.readouterr()
        runpy.run_path(str(notebook.path), run_name="__main__")
        return capfd.readouterr().out.splitlines()

    return script


def test_script_reads_as_somebody_would_have_written_it(notebook: Notebook) -> None:
    notebook.run(
        "import functools\nfrom collections import namedtuple\nimport torch.nn as nn",
        """
def scaled(x):
    return x * 100

# A line.
class Net(nn.Module):
    def forward(self, x):
        return scaled(x)

Outcome = namedtuple("Outcome", "loss")
square = lambda v: v * v
EPOCHS = 1
never_used = open
""",
        "def scaled(x):\n    return x * factor\nfactor = 1.0\nEPOCHS = 2\nseed = object",
        "net = Net()",
    )
    cell = """
import math

# the loop
for epoch in range(EPOCHS):
    loss = square(net(math.pi))

Outcome(round(loss, 3))  # the result
"""
    script = notebook.export(cell, num_processes=2, mixed_precision="bf16")
    head, script = script.split("python train.py\n")
    assert "#     notebook-accel launch --num_processes 2 --mixed_precision bf16 train.py\n" in head
    assert "#     torchrun --nproc_per_node 2 train.py\n" in head
    assert (
        script
        == """
from collections import namedtuple
import math
import os
import pathlib
import sys
import torch
import torch.nn as nn


os.environ.setdefault("ACCELERATE_MIXED_PRECISION", "bf16")
EPOCHS = 2
factor = 1.0


# A line.
class Net(nn.Module):
    def forward(self, x):
        return scaled(x)


Outcome = namedtuple("Outcome", "loss")


square = lambda v: v * v


def scaled(x):
    return x * factor


# The values that have no source in the notebook are in train_data.pt, pickled by Python {}: load no such file that \
you don't trust.
sys.modules["__main__"] = sys.modules[__name__]  # has their classes, also in a spawned worker
_data = torch.load(pathlib.Path(__file__).with_name("train_data.pt"), map_location="cpu", weights_only=False)
net = _data["net"]  # Net


if __name__ == "__main__":
    # the loop
    for epoch in range(EPOCHS):
        loss = square(net(math.pi))

    result = Outcome(round(loss, 3))  # the result
    if result is not None:
        print(result)
""".format(".".join(map(str, sys.version_info[:2])))
    )


@pytest.mark.parametrize(
    ("before", "cell", "printed"),
    [
        (["k = 0.5", "def f(b=k): return b"], "f()", ["0.5"]),
        (["def f(): return 1\ng = f", "def f(): return 2"], "f(), g()", ["(2, 1)"]),
        (["def f(): return 1\ng = f"], "g is f", ["True"]),
        (["class Base: pass\nParent = Base\nclass Child(Parent): pass"], "issubclass(Child, Base)", ["True"]),
        (["import numpy as np\na = np.arange(3)\nclass Child:\n    first = a[1]"], "Child.first", ["1"]),
        (["pair = [1, 2]\nsame = pair"], "pair is same", ["True"]),
        (["import functools\n@functools.lru_cache\ndef fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)"],
         "fib(10)", ["55"]),
        (["import functools\ndef f(): return 1\nf = functools.wraps(f)(lambda: 5)"], "f()", ["5"]),
        (["class Open: pass\ndef f(self): return 1\nOpen.f = f"], "Open().f()", ["1"]),
        (["exec('def ghost(): return 4')"], "ghost()", ["4"]),
        (["for k in range(2):\n    print('no script does this')\n    def f(): return 3"], "f()", ["3"]),
        (["f = g = lambda: 5"], "f is g, f()", ["(True, 5)"]),
        (["def make(k):\n    def times(v): return v * k\n    return times\nthree = make(3)"], "three(2)", ["6"]),
        (["chosen = [lambda: 2][0]"], "chosen()", ["2"]),
        (["import dataclasses\n@dataclasses.dataclass\nclass Settings:\n    rate: float = 0.1\ns = Settings(0.5)"],
         "s, Settings()", ["(Settings(rate=0.5), Settings(rate=0.1))"]),
        (["from enum import Enum\nclass Color(Enum):\n    RED = 1\nred = Color.RED"], "red is Color.RED", ["True"]),
        (["import torch\n@torch.no_grad()\ndef f(): return torch.is_grad_enabled()"], "f()", ["False"]),
        (["try:\n    from math import pi\nexcept ImportError:\n    pass"], "round(pi, 2)", ["3.14"]),
        (["import torch\nimport torch.utils.data"], "torch.utils.data.__name__", ["torch.utils.data"]),
        (["nan = float('nan')"], "nan", ["nan"]),
        ([], "a = 1; b = 2\na + b", ["3"]),
        ([], "result = 1\nresult, 2", ["(1, 2)"]),
        ([], "print('once')", ["once"]),
        ([], "None", []),
        ([], "x = 1\ndef f(y=x): return y\ndef f(): return 2\nf()", ["2"]),
        ([], 'if True:\n    print("""a\n  b""")', ["a", "  b"]),
        ([], "from collections import Counter\n\ndef train(): return Counter('a')['a']", ["1"]),
    ],
)  # fmt: skip
def test_script_comes_to_what_the_cell_comes_to(
    notebook: Notebook, run: Any, before: list[str], cell: str, printed: list[str]
) -> None:
    notebook.run(*before)
    assert run(cell) == printed


@pytest.mark.parametrize(("args", "printed"), [("(7, 'a')", "7 a"), ("pair", "1 2"), ("[1]", "[1] 0")])
def test_final_function_is_called_with_the_arguments(notebook: Notebook, run: Any, args: str, printed: str) -> None:
    notebook.run("pair = (1, 2)")
    assert run("def train(a, b=0):\n    print(a, b)", args) == [printed]


@pytest.mark.parametrize(
    ("cell", "printed"),
    [
        ("!echo a", ["a"]),
        ("!exit 3\nprint(_exit_code)", ["3"]),
        ("x = !echo a; echo b >&2\nx", ["['a', 'b']"]),
        ("word = 'b'\n!echo {EPOCHS + 1} $word '$word'", ["3 b $word"]),
        ("!echo {missing}", ["{missing}"]),
        ("echo(1)", ["1 2"]),
    ],
)
def test_shell_command_does_what_it_does_in_the_notebook(
    notebook: Notebook, run: Any, cell: str, printed: list[str]
) -> None:
    notebook.run("EPOCHS = 2", "def echo(v):\n    !echo $v {EPOCHS}")
    assert run(cell) == printed


@pytest.mark.slow
def test_spawned_workers_of_a_loader_find_what_the_script_has(notebook: Notebook) -> None:
    notebook.run("""
import torch
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self): return 3
    def __getitem__(self, index): return index ** 2

squares = Squares()
""")
    notebook.export("""
class Shifted(Dataset):
    def __len__(self): return 3
    def __getitem__(self, index): return squares[index] + SHIFT
SHIFT = 10
class Local(Shifted): pass
loader = DataLoader(squares, num_workers=1, multiprocessing_context="spawn")
other = DataLoader(Local(), batch_size=3)
[int(x) for x in loader], next(iter(other)).tolist()
""")
    words = [sys.executable, str(notebook.path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "([0, 1, 4], [10, 11, 14])\n"


def test_definitions_stand_outside_of_the_main_program_where_that_changes_nothing(notebook: Notebook) -> None:
    cell = """
start = print
class Local: pass
class Late:
    x = start()
def f(): return start
def g(y=start): pass
f()
"""
    before, _, main = notebook.export(cell).partition('if __name__ == "__main__":')
    assert [name in before for name in ("class Local", "class Late", "def f", "def g")] == [True, False, True, False]
    assert "class Local" not in main and "class Late" in main


def test_functions_see_what_the_notebook_has_and_not_what_the_cell_defines_later(notebook: Notebook, run: Any) -> None:
    notebook.run("def make(): return 'the notebook has this'\nmade = [make]")
    assert run("made[0]()\nprint(made[0]())\ndef helper(): return 1\nhelper()") == ["the notebook has this", "1"]


@pytest.mark.parametrize(
    ("before", "cell", "said"),
    [
        ("", "x = 1\ny = input('how many? ')", "In[2], line 3: 'input' asks at a keyboard"),
        ("def ask():\n    return input()", "ask()", "In[1], line 2: 'input' asks at a keyboard"),
        ("def helper(): return 1\ndef uses(): return helper()\ndel helper", "uses()", "'helper' isn't there in the"),
        ("", "nowhere + 1", "In[2], line 2: 'nowhere' isn't there in the notebook"),
        ("class Uses:\n    def f(self): return lost()\nuses = Uses()", "uses", "line 2: 'lost' isn't there in the"),
        ("", "Out[1]", "line 2: 'Out' is the notebook's"),
        ("", "get_ipython().user_ns", "line 2: 'get_ipython' is the notebook's"),
        ("", "x = 1\n%time x", "In[2], line 3: %time is IPython's, and a script has none"),
        ("def f():\n    %cd /\n    pass", "f()", "In[1], line 2: %cd is IPython's, and a script has none"),
        ("made = (i for i in range(3))", "list(made)", 'global "made" can\'t be sent to another process'),
        ("", "1", "--push lost: the notebook has no name 'lost'"),
        ("", "def train(a): pass", "--args $: it is not Python"),
    ],
)
def test_what_cannot_be_exported_is_named(notebook: Notebook, before: str, cell: str, said: str) -> None:
    notebook.run(before)
    with pytest.raises(NotebookAccelError) as caught:
        notebook.export(cell, "$" if "--args" in said else None, push=["lost"] if "--push" in said else [])
    assert said in str(caught.value)
    assert list(notebook.path.parent.iterdir()) == []


def test_only_its_own_file_is_replaced(notebook: Notebook) -> None:
    notebook.run("class Thing: pass\nthing = Thing()")
    notebook.export("1")
    notebook.export("thing")
    with notebook.path.open("a") as file:
        file.write("# by hand")
    with pytest.raises(
        ConfigError, match=r"train\.py exists already: no export has written it, or it has changed since"
    ):
        notebook.export("1")
    assert "by hand" in notebook.path.read_text()
    notebook.export("1", overwrite=True)
    notebook.path.unlink()
    with pytest.raises(ConfigError, match=r"train_data\.pt exists already"):
        notebook.export("1")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("train", "a script's name ends with .py"),
        ("no/train.py", "There is no folder .*no."),
        (f"{'x' * 300}.py", "can't be written: File name too long."),
    ],
)
def test_path_that_cannot_be_is_refused(notebook: Notebook, path: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        notebook.export("1", path=notebook.path.parent / path)


def test_script_compiles_as_the_launch_does(notebook: Notebook) -> None:
    script = notebook.export("1", dynamo_backend="eager")
    assert 'os.environ.setdefault("ACCELERATE_DYNAMO_BACKEND", "eager")\n' in script
    assert "launch --dynamo_backend eager train.py" in script
