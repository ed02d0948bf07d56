"""The meaning of a cell, seen from a real kernel: variables, results, classes, workers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

import pytest

from tests import kernels

Run = Callable[[str], kernels.Outcome]

DEFINITIONS = """
import torch
from torch.utils.data import Dataset, DataLoader
SCALE = 3
def helper(x): return x * SCALE
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.tied = self.layer
    def forward(self, x): return helper(self.layer(x))
class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return helper(index)
model, numbers, triple = Model(), Numbers(), lambda x: helper(x)
"""


def test_accelerate_itself_runs_inside_a_launch(done: Run) -> None:
    outcome = done("""%%distributed -n 2 --mixed_precision bf16
from accelerate import Accelerator
other = Accelerator()
other.num_processes, other.gather(torch.tensor([other.process_index])).tolist(), other.mixed_precision""")
    assert outcome.result == "[(2, [0, 1], 'bf16'), (2, [0, 1], 'bf16')]"


@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("forkserver", marks=pytest.mark.slow), pytest.param("spawn", marks=pytest.mark.slow)],
)
def test_loader_workers_find_notebook_and_cell_classes(done: Run, method: str) -> None:
    done(DEFINITIONS)
    outcome = done(f"""%%distributed -n 1
OFFSET = 100
class Shifted(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return helper(index) + OFFSET
class Sample:
    def __init__(self, values): self.values = values.tolist()
def sampled(batch): return Sample(torch.tensor(batch))
both = torch.utils.data.ConcatDataset([numbers, Shifted()])
loader = DataLoader(both, batch_size=4, num_workers=1, multiprocessing_context="{method}", collate_fn=sampled)
drawn = list(loader)
assert all(type(sample) is Sample for sample in drawn)
[sample.values for sample in drawn]""")
    assert outcome.result == "[[[0, 3, 6, 9], [12, 15, 18, 21], [100, 103, 106, 109]]]"


def test_what_a_cell_assigns_stays_in_the_ranks(run: Run, done: Run) -> None:
    done("count, left = 1, 'notebook'")
    outcome = done("%%distributed -n 2\ncount = count + int(os.environ['RANK']) + 1\nleft = 'rank'\ncount")
    assert outcome.result == "[2, 3]"
    assert run("count, left").result == "(1, 'notebook')"


def test_final_def_that_needs_arguments_is_defined_and_the_next_cell_launches_it(run: Run, done: Run) -> None:
    cell = """%%distributed -n 2 --mixed_precision bf16
import fractions
RATE = 3
def share(x): return fractions.Fraction(x, RATE)
def portion(slices, *, plates=1):
    return str(share(slices)), plates, os.environ["ACCELERATE_MIXED_PRECISION"]"""
    outcome = done(cell)
    call = "notebook_launcher(portion, (10,), num_processes=2, mixed_precision='bf16')"
    assert outcome.stdout == (
        f"portion wasn't launched: slices would have no value. To launch it: --args 10, or {call}\n"
    )
    assert done(f"from notebook_accel import notebook_launcher\n{call}").result == (
        "[('10/3', 1, 'bf16'), ('10/3', 1, 'bf16')]"
    )
    outcome = done(cell.replace("def portion(slices, *, plates=1)", "def portion(slices, knives, *, plates)"))
    assert "slices, knives, plates would have no value" in outcome.stdout
    assert "To launch it: notebook_launcher(portion, (slices, knives), kwargs={'plates': 10}, num_" in outcome.stdout
    for flag in ("--pull x", "--out x", "--background", "--detach"):
        refused = run(cell.replace("-n 2", f"-n 2 {flag}"))
        assert "each rank calls portion: slices would have no value" in refused.traceback


def test_definitions_beside_a_final_def_replace_those_of_earlier_cells(run: Run, done: Run) -> None:
    """Otherwise a launch of the function from the next cell would run other code than the cell has run."""
    for factor in (2, 100):
        helper = f"scaled = None\ndef helper(x): return x * {factor}"
        done(f"%%distributed -n 1 --args 3\n{helper}\ndef scaled(x): return helper(x)")
        assert run("scaled(3)").result == str(3 * factor)


def test_final_def_that_only_the_ranks_can_define_is_told(done: Run) -> None:
    outcome = done("%%distributed -n 1\nsteps = sum([1, 2])\ndef counted(n=steps): return n")
    assert outcome.result == "[3]"
    assert outcome.stderr == "counted isn't defined in the notebook: NameError: name 'steps' is not defined\n"


def test_function_that_was_defined_here_shows_its_source_when_it_fails_here(run: Run, done: Run) -> None:
    done("%%distributed -n 1\nimport math\n\ndef half(x=4):\n    return math.sqrt(x) / 2  # this line")
    outcome = run("half(-1)")
    assert "return math.sqrt(x) / 2" in re.sub(r"\x1b\[[0-9;]*m", "", outcome.traceback)


@pytest.mark.front_end
def test_shell_commands_and_line_magics_work_in_ranks(done: Run) -> None:
    outcome = done("""%%distributed -n 2
listed = !echo from a shell
!echo printed by a shell
%cd /
%env COLOUR=blue
where = %pwd
listed, where""")
    assert outcome.result == "[(['from a shell'], '/'), (['from a shell'], '/')]"
    said = ["printed by a shell", "/", "env: COLOUR=blue"]
    assert sorted(kernels.unfolded(outcome.stdout)[1:]) == sorted(f"{rank} │ {line}" for rank in "01" for line in said)


@pytest.mark.front_end
def test_shell_commands_have_the_notebooks_and_the_ranks_variables(done: Run) -> None:
    done("folder, size = 'runs of mine', 7")
    outcome = done("""%%distributed -n 2
rank = int(os.environ["RANK"])
def listed(name):
    found = !echo $name of $rank in "$folder"
    return found
%env SIZE={size + rank}
shown = !echo {size} $size '$size' $$SIZE {listed("it")[0]}
shown""")
    said = [f"7 7 $size {7 + rank} it of {rank} in runs of mine" for rank in range(2)]
    assert ast.literal_eval(outcome.result) == [[line] for line in said]


def test_semicolon_hides_the_value(run: Run, done: Run) -> None:
    assert done("%%distributed -n 1 --out five\n5;  # not shown").result == ""
    assert run("five[0]").result == "5"
    assert done("%%distributed -n 1\nfor i in range(9):\n    if i < 3: continue\n    break\nx = i; x").result == "[3]"


def test_final_def_leaves_the_notebooks_other_names_alone(run: Run, done: Run) -> None:
    done("state, size = 'trained', 3")
    done(
        "%%distributed -n 1\nstate = None\nsize = 5\nadded = 7\n"
        "device = torch.device('cpu')\ndef go(d=None): return size"
    )
    assert run("state, size, added, go()").result == "('trained', 3, 7, 3)"


@pytest.mark.slow
def test_libraries_own_variables_keep_the_template(done: Run) -> None:
    before = done("%%distributed -n 1\nos.getppid()").result
    done("torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)\nimport sklearn")
    assert done("%%distributed -n 1\nos.getppid()").result == before


def test_cell_that_trains_goes_on_where_it_was_when_it_is_run_again(run: Run, done: Run) -> None:
    done("""from torch.utils.data import DataLoader
torch.manual_seed(0)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(list(zip(torch.randn(32, 8), torch.ones(32, 1))), batch_size=8)""")
    cell = """%%distributed -n 2 --pull {pull}
from notebook_accel import Accelerator
accelerator = Accelerator()
wrapped, optimizer, batches = accelerator.prepare(net, optimizer, loader)
for x, y in batches:
    loss = (wrapped(x) - y).square().mean()
    accelerator.backward(loss); optimizer.step(); optimizer.zero_grad()
net = accelerator.unwrap_model(wrapped)
loss.item()"""
    weights = []
    for _ in range(3):
        done(cell.format(pull="net,optimizer"))
        weights.append(run("net.weight.sum().item()").result)
    assert len(set(weights)) == 3
    done(cell.format(pull="net"))
    assert "made for another model" in run(cell.format(pull="net")).traceback


def test_settings_of_torch_are_those_of_the_notebook(done: Run) -> None:
    settings = """(torch.get_default_dtype(), torch.get_deterministic_debug_mode(), torch.is_anomaly_enabled(),
    torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)"""
    usual = done(settings).result
    done("""torch.set_default_dtype(torch.float64); torch.use_deterministic_algorithms(True, warn_only=True)
torch.set_float32_matmul_precision("high"); torch.autograd.set_detect_anomaly(True)
torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True""")
    try:
        changed = done(settings).result
        assert changed == "(torch.float64, 1, True, 'high', True, True)"
        in_ranks = done(f"%%distributed -n 2\n{settings}").result
        assert " ".join(in_ranks.split()) == f"[{changed}, {changed}]"  # IPython shows a list in several lines
    finally:
        done("""torch.set_default_dtype(torch.float32); torch.use_deterministic_algorithms(False)
torch.set_float32_matmul_precision("highest"); torch.autograd.set_detect_anomaly(False)
torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False""")
    assert done(f"%%distributed -n 1\n{settings}").result == f"[{usual}]"


def test_name_reached_through_eval_asks_for_push(run: Run, done: Run) -> None:
    done("hidden = 41")
    outcome = run("%%distributed -n 2\neval('hidden + 1')")
    assert "--push hidden" in outcome.traceback
    assert done("%%distributed -n 2 --push hidden\neval('hidden + 1')").result == "[42, 42]"


def test_name_that_only_earlier_ranks_had_asks_for_pull_or_a_session(run: Run, done: Run) -> None:
    done("%%distributed -n 1\nfor _ in range(1):\n    before, made_there = 1, 2")
    outcome = run("%%distributed -n 1\nmade_there + 1")
    assert "Fix: an earlier cell assigned 'made_there' in its ranks" in outcome.traceback
    assert "--pull made_there" in outcome.traceback and "%distributed start" in outcome.traceback
    assert "--pull" not in run("%%distributed -n 1\nnever_made + 1").traceback
    done("%%distributed -n 1\non_the_first_line = 2")
    assert "--pull on_the_first_line" in run("%%distributed -n 1\non_the_first_line + 1").traceback
    done("%%distributed -n 1 --pull made_there\nmade_there = 2")
    assert done("%%distributed -n 1\nmade_there + 1").result == "[3]"


def test_warning_names_the_users_line(done: Run) -> None:
    cell = """%%distributed -n 2
from notebook_accel import Accelerator
accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(2, 1))
accelerator.backward(model(torch.ones(1, 2)).sum())"""
    assert re.search(r"In\[\d+\]:5: UserWarning: No loader has been prepared", done(cell).stdout)


def test_input_says_that_there_is_nobody_to_ask(run: Run) -> None:
    said = run("%%distributed -n 1\ninput('really?')").traceback
    assert "a rank has no keyboard" in said and "input('really?')" in said
    assert ".py" not in said


def test_ranks_have_the_kernels_state_of_the_launch(done: Run, tmp_path: object) -> None:
    done(f"""import sys
before = os.getcwd(), list(sys.path)
os.chdir({str(tmp_path)!r}); sys.path.append({str(tmp_path)!r}); os.environ["MY_SETTING"] = "now"
open("my_module_xyz.py", "w").write("VALUE = 7")""")
    outcome = done("""%%distributed -n 2
import my_module_xyz
(os.getcwd(), os.environ["MY_SETTING"], my_module_xyz.VALUE)""")
    done("os.chdir(before[0]); sys.path[:] = before[1]; del os.environ['MY_SETTING']")
    assert outcome.result.replace(" ", "").replace("\n", "") == str([(str(tmp_path), "now", 7)] * 2).replace(" ", "")


def test_numbers_beside_a_bar_are_metrics(done: Run) -> None:
    outcome = done("""%%distributed -n 1
from tqdm.auto import tqdm
bar = tqdm(range(3))
for i in bar: bar.set_postfix(loss=torch.tensor(i / 4), phase="warm")""")
    assert "rank 0  finished  step 3/3  loss 0.5" in outcome.stdout


def test_background_job_binds_what_it_pulls_when_its_results_are_read(run: Run, done: Run) -> None:
    done("total = 0")
    done("%%distributed -n 2 --background --out job --pull total --view none\ntotal = 5")
    assert run("total").result == "0"
    assert run("list(job.results(timeout_s=30)), total").result == "([None, None], 5)"


def test_source_of_earlier_cells_is_there_in_the_ranks(run: Run, done: Run) -> None:
    done("def double(x: torch.Tensor):\n    return x * 2\ndef fails():\n    raise KeyError('here')")
    cell = (
        "%%distributed -n 2\nimport inspect\ntorch.jit.script(double)(torch.ones(1)).item(), inspect.getsource(double)"
    )
    assert ast.literal_eval(done(cell).result) == [(2.0, "def double(x: torch.Tensor):\n    return x * 2\n")] * 2
    assert "raise KeyError('here')" in run("%%distributed -n 2\nfails()").traceback
