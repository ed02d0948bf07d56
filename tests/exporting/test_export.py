"""Scripts that a real kernel exports, run by torchrun and by ``notebook-accel launch``."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests import kernels

_SETUP = """
%load_ext notebook_accel
import os
import functools
from collections import namedtuple

import torch
import torch.nn as nn
import torch.utils.data
from torch.utils.data import DataLoader, TensorDataset
"""
_DEFINITIONS = """
def scaled(x):
    return x * 100

# A line.
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, x):
        return scaled(self.line(x))

Outcome = namedtuple("Outcome", "rank loss")
square = lambda v: v * v
EPOCHS = 1
never_used = open(os.devnull)
"""
_EDITED = """
def scaled(x):
    return x * factor
factor = 1.0
EPOCHS = 2
x = torch.linspace(-1, 1, 64).reshape(-1, 1)
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=8)
"""
_OUTCOME = r"Outcome\(rank=\d, loss=\([^()]*\)\)"  # two ranks may write on one line, under torchrun
_CELL = """
from notebook_accel import Accelerator

accelerator = Accelerator()
net, optimizer, loader = accelerator.prepare(model, optimizer, loader)

# the loop
for epoch in range(EPOCHS):
    for a, b in loader:
        loss = square(net(a) - b).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
Outcome(accelerator.process_index, (round(loss.item(), 5), accelerator.mixed_precision))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def notebook(folder: pathlib.Path) -> Iterator[kernels.Kernel]:
    variables = {"NOTEBOOK_ACCEL_CONFIG_FILE": os.devnull, "CUDA_VISIBLE_DEVICES": ""}
    with kernels.running(folder, variables) as kernel:
        for cell in (_SETUP, _DEFINITIONS, _EDITED):
            assert kernel.run(cell).status == "ok"
        yield kernel


def export(notebook: kernels.Kernel, cell: str, flags: str = "") -> kernels.Outcome:
    return notebook.run(f"%%distributed --export train.py --overwrite {flags}\n{cell}")


def run(folder: pathlib.Path, *command: str) -> str:
    words = [sys.executable, "-m", *command, str(folder / "train.py")]
    done = subprocess.run(words, cwd="/", capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def outcomes(notebook: kernels.Kernel) -> list[str]:
    """Return the cell's results in the notebook, by rank."""
    cell = notebook.run(f"%%distributed -n 2 --mixed_precision bf16\n{_CELL}", 100)
    found = re.findall(_OUTCOME, cell.result)
    assert len(found) == 2, cell.traceback
    return found


@pytest.mark.parametrize(
    "command",
    [["torch.distributed.run", "--nproc_per_node", "2"], ["notebook_accel", "launch", "--num_processes", "2"]],
    ids=["torchrun", "notebook-accel launch"],
)
def test_script_comes_to_what_the_cell_comes_to(
    notebook: kernels.Kernel, folder: pathlib.Path, outcomes: list[str], command: list[str]
) -> None:
    exported = export(notebook, _CELL, "-n 2 --mixed_precision bf16 --pull model")
    assert "Written: train.py, and train_data.pt (" in exported.stdout, exported.traceback
    assert ": model, optimizer, loader)" in exported.stdout
    assert "does without --pull" in exported.stdout
    assert "Launching" not in exported.stdout
    assert sorted(re.findall(_OUTCOME, run(folder, *command))) == outcomes


def test_script_compiles_as_the_launch_does(notebook: kernels.Kernel, folder: pathlib.Path) -> None:
    assert export(notebook, _CELL, "-n 2 --dynamo_backend eager").status == "ok"
    script = (folder / "train.py").read_text()
    assert 'os.environ.setdefault("ACCELERATE_DYNAMO_BACKEND", "eager")\n' in script
    assert "launch --num_processes 2 --dynamo_backend eager train.py" in script


@pytest.mark.front_end
def test_script_reads_as_somebody_would_have_written_it(notebook: kernels.Kernel, folder: pathlib.Path) -> None:
    assert export(notebook, _CELL, "-n 2 --mixed_precision bf16").status == "ok"
    head, script = (folder / "train.py").read_text().split("python train.py\n")
    assert "#     notebook-accel launch --num_processes 2 --mixed_precision bf16 train.py\n" in head
    assert "#     torchrun --nproc_per_node 2 train.py\n" in head
    assert (
        script
        == """
import os
import pathlib
import sys
from collections import namedtuple

import torch
import torch.nn as nn
from notebook_accel import Accelerator

os.environ.setdefault("ACCELERATE_MIXED_PRECISION", "bf16")
EPOCHS = 2
factor = 1.0


# A line.
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, x):
        return scaled(self.line(x))


Outcome = namedtuple("Outcome", "rank loss")

square = lambda v: v * v


def scaled(x):
    return x * factor


# The values that have no source in the notebook are in train_data.pt, pickled: load no such file that you don't trust.
sys.modules["__main__"] = sys.modules[__name__]  # has their classes, also in a spawned worker
_data = torch.load(pathlib.Path(__file__).with_name("train_data.pt"), map_location="cpu", weights_only=False)
model = _data["model"]  # Net
optimizer = _data["optimizer"]  # SGD
loader = _data["loader"]  # DataLoader


if __name__ == "__main__":
    accelerator = Accelerator()
    net, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    # the loop
    for epoch in range(EPOCHS):
        for a, b in loader:
            loss = square(net(a) - b).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    result = Outcome(accelerator.process_index, (round(loss.item(), 5), accelerator.mixed_precision))
    if result is not None:
        print(result)
"""
    )


_ODD_DEFINITIONS = """
import dataclasses
import numpy as np

@dataclasses.dataclass
class Settings:
    rate: float = 0.1

@functools.lru_cache(maxsize=None)
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)

@torch.no_grad()
def evaluate():
    return "first"

def make(k):
    def times(v):
        return v * k
    return times

class Mapped(torch.utils.data.Dataset):
    def __init__(self, transform):
        self.transform = transform
    def __len__(self):
        return 3
    def __getitem__(self, index):
        return self.transform(index) + offsets[index]

offsets = np.arange(3) * 10
class Base:
    pass
Parent = Base
class Child(Parent):
    first = offsets[1]
three_times = make(3)
older = evaluate
bound = functools.partial(evaluate)
def plus_one(v):
    return v + 1
mapped = Mapped(plus_one)
table = {"twice": lambda v: 2 * v}
settings = Settings(0.5)
pair = [1, 2]
same = pair
"""
_ODD_EDIT = """
def evaluate():
    return "second"
"""
_ODD_CELL = '''
!echo from the shell
LIMIT = 3
class Local(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return index + LIMIT

def make(k):
    raise ValueError("the notebook's is another one")

def train(v, given):
    loader = DataLoader(mapped, num_workers=1, multiprocessing_context="spawn")
    print([int(value) for value in loader], fib(10), evaluate(), older(), bound())
    print(Child.first, given, same is pair, len(Local()), """a
  b""")
    return table["twice"](three_times(v))
'''


def test_odd_things_arrive_and_workers_find_them(notebook: kernels.Kernel, folder: pathlib.Path) -> None:
    for cell in (_ODD_DEFINITIONS, _ODD_EDIT):
        assert notebook.run(cell).status == "ok"
    exported = export(notebook, _ODD_CELL, "--args (7, settings)")
    assert exported.status == "ok", exported.traceback
    script = (folder / "train.py").read_text()
    by_value = re.search(r"# By value, for Python 3\.\d+ \(cloudpickle\), .*: (.*)\.\n", script)
    assert by_value is not None and set(by_value[1].split(", ")) == {"evaluate", "<lambda>", "make.<locals>.times"}
    assert script.count("def make(") == 1
    assert "@torch.no_grad()\ndef older():\n" in script
    assert script.index("class Base:") < script.index("Parent = Base") < script.index("class Child(Parent):")
    assert script.index("_data = ") < script.index("class Child(Parent):")
    assert run(folder, "notebook_accel", "launch", "-n", "1", "--start_method", "inline").splitlines()[1:] == [
        "from the shell",
        "[1, 12, 23] 55 second first first",
        "10 Settings(rate=0.5) True 2 a",
        "  b",
        "42",
    ]


@pytest.mark.parametrize(
    ("cell", "printed"),
    [
        ("!echo a", ["a"]),
        ("!exit 3\nprint(_exit_code)", ["3"]),
        ("if EPOCHS:\n    !exit 4\n_exit_code", ["4"]),
        ("word = 'b'\n!echo {EPOCHS + 1} $word '$word'", ["3 b $word"]),
        ("!echo $EPOCHS ${#HOME} >/dev/null; echo {EPOCHS}", ["{EPOCHS}"]),
        ("echo(1)", ["1 2"]),
    ],
)
def test_shell_command_prints_what_it_prints_in_the_notebook(
    notebook: kernels.Kernel, folder: pathlib.Path, cell: str, printed: list[str]
) -> None:
    notebook.run("def echo(v):\n    !echo $v {EPOCHS}")
    exported = export(notebook, cell)
    assert exported.status == "ok", exported.traceback
    done = subprocess.run([sys.executable, folder / "train.py"], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == printed


_UNCHANGED = """
import typing
import bare
times = {}
k = 0.5
def timed(g):
    @functools.wraps(g)
    def run(*args, **more):
        times[g.__name__] = times.get(g.__name__, 0) + 1
        return g(*args, **more)
    return run

@timed
@torch.no_grad()
def pick(a, /, b=k, *more, c=None, d=-k, e=(torch.float16, nn), key=lambda v: v, nan=float("nan")):
    return a, b, c, d, e[0], torch.is_grad_enabled()

class Picker:
    def __init__(self, b=k, *, c=k):
        self.both = b, c

    @staticmethod
    def of(b=k):
        return b

    @typing.overload
    def over(self, b: int = ...): ...
    def over(self, b=k):
        return b

    @bare.without_wraps
    def bare(self, b=k):
        return b
pick(0)
first = pick
"""


def test_definitions_whose_defaults_and_decorators_are_as_they_were(
    notebook: kernels.Kernel, folder: pathlib.Path
) -> None:
    (folder / "bare.py").write_text("def without_wraps(g):\n    return lambda self: g(self)\n")
    assert notebook.run(_UNCHANGED).status == "ok"
    exported = export(notebook, "print(first(1), Picker().both, Picker.of(), Picker().over(), Picker().bare(), times)")
    assert exported.status == "ok", exported.traceback
    done = subprocess.run([sys.executable, folder / "train.py"], capture_output=True, text=True, check=True)
    assert done.stdout == "(1, 0.5, None, -0.5, torch.float16, False) (0.5, 0.5) 0.5 0.5 0.5 {'pick': 2}\n"


_REGISTER = """
seen = []
def reg(n):
    def at(g):
        seen.append(n)
        return g
    return at
@reg(1)
def f(): pass
"""
_COUNT = """
count = 0
def numbered(g):
    global count
    count += 1
    return functools.wraps(g)(lambda: g())
@numbered
def f(): pass
"""


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("def f(): return 1\nf = wrapped(f)", "'f' can't be exported: it was wrapped after its definition"),
        ("def g(): return 1\nf = torch.no_grad()(g)", "'f' can't be exported: it was wrapped after its definition"),
        ("@torch.no_grad()\ndef f(): return 1\nf = wrapped(f)", "it was wrapped after its definition"),
        ("k = 1\ndef f(a=0, b=k, *, c=2): return b\nk = 5", "the default of 'b' is 1, but `k` is 5 now"),
        ("k = 1\ndef f(*, b=(k, 2)): return b\nk = 5", "'b' is (1, 2), but `(k, 2)` is (5, 2) now"),
        ("k = 1\nf = lambda a=-k: a\nk = 5", "the default of 'a' is -1, but `-k` is -5 now"),
        ("k = 1\n@wrapped\ndef f(a=k): return a\nk = 5", "the default of 'a' is 1, but `k` is 5 now"),
        ("def f(seen=[]): seen.append(1)\nf()", "the default of 'seen' is [1], but `[]` is [] now"),
        ("k = 1\nclass f:\n    def m(self, a=k): pass\nk = 5", "the default of 'a' in m is 1, but `k` is 5 now"),
        ("def f(): return f.calls\nf.calls = 3", "'f' can't be exported: its calls was put on it after"),
        (_REGISTER, "'f' can't be exported: its decorator `reg(1)` changes 'seen'"),
        (_COUNT, "'f' can't be exported: its decorator `numbered` changes 'count'"),
    ],
)
def test_definition_that_would_make_something_else_in_the_script_is_refused(
    notebook: kernels.Kernel, before: str, said: str
) -> None:
    notebook.run("def wrapped(g):\n    return functools.wraps(g)(lambda *args: g(*args))")
    assert notebook.run(before).status == "ok"
    outcome = notebook.run("%%distributed --export refused.py\nf()")
    assert said in outcome.traceback


@pytest.mark.parametrize(
    ("before", "cell", "said"),
    [
        ("", "x = 1\ny = input('how many? ')", "line 3: 'input' asks at a keyboard"),
        ("def ask():\n    return input()", "ask()", "line 2: 'input' asks at a keyboard"),
        ("def helper(): return 1\ndef uses(): return helper()\ndel helper", "uses()", "'helper' isn't there in the"),
        ("", "nowhere + 1", "line 2: 'nowhere' isn't there in the notebook"),
        ("class Uses:\n    def f(self): return lost()\nuses = Uses()", "uses", "line 2: 'lost' isn't there in the"),
        ("exec('def ghost(): return 1')", "ghost()", "The function 'ghost' can't be exported: the cell that has defin"),
        ("exec('class Ghost:\\n    def f(self): pass')", "Ghost()", "The class 'Ghost' can't be exported"),
        ("chosen = [lambda: 2][0]", "chosen()", "The lambda 'chosen' can't be exported"),
        ("class Open: pass\ndef f(self): return 1\nOpen.f = f", "Open()", "its f was put into it after its definition"),
        (
            "@functools.singledispatch\ndef kind(x): return 1",
            "kind(1)",
            "the functions registered for it have no names",
        ),
        ("", "Out[1]", "line 2: 'Out' is the notebook's"),
        ("", "get_ipython().user_ns", "line 2: 'get_ipython' is the notebook's"),
        ("", "x = 1\n%time x", "line 3: %time is IPython's"),
        ("made = (i for i in range(3))", "list(made)", 'global "made" can\'t be sent to another process'),
    ],
)
def test_what_cannot_be_exported_is_named(notebook: kernels.Kernel, before: str, cell: str, said: str) -> None:
    assert notebook.run(before).status == "ok"
    outcome = notebook.run(f"%%distributed --export refused.py\n{cell}")
    assert outcome.status == "error"
    assert said in outcome.traceback
    assert len(outcome.traceback.splitlines()) <= 4
    assert notebook.value("[name for name in os.listdir() if 'refused' in name]") == "[]"


def test_only_its_own_file_is_replaced(notebook: kernels.Kernel) -> None:
    line = "%%distributed --export own.py"
    assert notebook.run(f"{line}\nmodel").status == "ok"
    assert notebook.run(f"{line}\nx = 1\nmodel").status == "ok"
    notebook.run("with open('own.py', 'a') as file: file.write('# by hand')")
    refused = notebook.run(f"{line}\nmodel")
    assert "own.py exists already: no export has written it, or it has changed since" in refused.traceback
    assert notebook.value("'by hand' in open('own.py').read()") == "True"
    assert notebook.run(f"{line} --overwrite\nmodel").status == "ok"
    notebook.run("os.unlink('own.py')")
    assert "own_data.pt exists already" in notebook.run(f"{line}\nmodel").traceback


def test_definitions_under_other_magics_are_found(notebook: kernels.Kernel, folder: pathlib.Path) -> None:
    assert notebook.run("%%time\ndef timed(v):\n    return v + 1\nclass Plain:\n    rate = 3").status == "ok"
    assert notebook.run("%%time\ndef timed(v):\n    return v + 2").status == "ok"
    assert export(notebook, "timed(Plain.rate)").status == "ok"
    script = (folder / "train.py").read_text()
    assert "\ndef timed(v):\n    return v + 2\n" in script
    assert "\nclass Plain:\n    rate = 3\n" in script


@pytest.mark.parametrize(
    ("flags", "cell", "said"),
    [
        ("--export train", "1", "a script's name ends with .py"),
        ("--export no/train.py", "1", "There is no folder no."),
        (f"--export {'x' * 300}.py", "model", "can't be written: File name too long."),
        (f"--export {'x' * 300}.py", "1", "can't be written: File name too long."),
        ("--overwrite", "1", "--overwrite goes with --export"),
        ("--export refused.py --args f(1)", "def g(x): pass", "only known when it is computed"),
        ("--export refused.py", "def g(x): pass", "each rank calls g: x would have no value"),
        ("--export refused.py --push nowhere", "1", "the notebook has no name 'nowhere'"),
    ],
)
def test_bad_flags(notebook: kernels.Kernel, flags: str, cell: str, said: str) -> None:
    outcome = notebook.run(f"%%distributed {flags}\n{cell}")
    assert outcome.status == "error"
    assert said in outcome.traceback + outcome.stderr


def test_modules_beside_the_notebook_are_mentioned_where_the_script_is_elsewhere(
    notebook: kernels.Kernel, folder: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (folder / "beside.py").write_text("value = 5\n")
    assert notebook.run("import beside").status == "ok"
    here = notebook.run("%%distributed --export train.py --overwrite\nbeside.value")
    assert here.stdout == "Written: train.py\n"
    there = notebook.run(f"%%distributed --export {tmp_path}/train.py\nbeside.value")
    assert f"It imports beside from {folder}, so copy that beside it" in there.stdout
