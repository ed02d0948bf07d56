"""A model, its optimizer and its schedule belong together in the ranks, whatever the notebook changes or pulls."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from notebook_accel.errors import RankFailedError
from notebook_accel.sessions import shared_parts
from notebook_accel.sessions.kernel.session import Session

_TRAIN = """
before = [p.detach().clone() for p in model.parameters()]
losses = []
for _ in range(3):
    loss = ((model(xs) - 5) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    losses.append(loss.item())
held = {id(p) for group in opt.param_groups for p in group["params"]}
{"losses": losses, "is_together": held == {id(p) for p in model.parameters()}}
"""
_PREPARE = """
from notebook_accel import Accelerator
accelerator = Accelerator()
net, optim = accelerator.prepare(model, opt)
def train():
    for _ in range(3):
        loss = ((net(xs) - 5) ** 2).mean()
        optim.zero_grad()
        accelerator.backward(loss)
        optim.step()
    return torch.equal(net(xs), model(xs)), net(xs).mean().item()
"""


def _refuse() -> None:
    raise ValueError("this can't be opened here")


class Unopenable:
    def __reduce__(self) -> Any:
        return _refuse, ()


class Remade(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def __reduce__(self) -> Any:
        return Remade, ()


class Notebook:
    """The notebook's variables, and the commands of its session."""

    def __init__(self, session: Session, variables: dict[str, Any]) -> None:
        self.session, self.variables = session, variables

    def __getitem__(self, name: str) -> Any:
        return self.variables[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.variables[name] = value

    def push(self, *names: str) -> None:
        self.session.push(**{name: self[name] for name in names})

    def pull(self, *names: str) -> None:
        values = self.session.pull(*names)
        self.variables.update(zip(names, values if len(names) > 1 else [values], strict=True))

    def shown(self, code: str) -> Any:
        """Return the value of a cell, which is the same on both ranks."""
        shown = self.session.execute(code)
        assert shown[0] == shown[1]
        return ast.literal_eval(shown[0])


@pytest.fixture
def notebook(session: Session, monkeypatch: pytest.MonkeyPatch) -> Notebook:
    """A notebook with a model and its optimizer, each test's under new names for the ranks."""
    session.execute("for name in ('model', 'opt'): globals().pop(name, None)")
    main = sys.modules["__main__"]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for name, value in {"model": model, "opt": opt, "xs": torch.randn(8, 2)}.items():
        monkeypatch.setattr(main, name, value, raising=False)
    for name in ("other", "schedule"):
        monkeypatch.setattr(main, name, None, raising=False)
    return Notebook(session, vars(main))


def _set_rate(notebook: Notebook) -> None:
    notebook["opt"].param_groups[0]["lr"] = 0.02


def _new_sgd(notebook: Notebook) -> None:
    notebook["opt"] = torch.optim.SGD(notebook["model"].parameters(), lr=0.01)


def _new_adam(notebook: Notebook) -> None:
    notebook["opt"] = torch.optim.Adam(notebook["model"].parameters(), lr=0.02)


def _schedule(notebook: Notebook) -> None:
    notebook["schedule"] = torch.optim.lr_scheduler.StepLR(notebook["opt"], 1, 0.5)


def _fill(notebook: Notebook) -> None:
    with torch.no_grad():
        notebook["model"][2].weight.fill_(3.0)


def _load(notebook: Notebook) -> None:
    notebook["model"].load_state_dict({name: value + 1 for name, value in notebook["model"].state_dict().items()})


def _pull_then_push(notebook: Notebook) -> None:
    notebook.pull("model")
    notebook.push("model")


def _pull_then_set_rate(notebook: Notebook) -> None:
    notebook.pull("model", "opt")
    _set_rate(notebook)


# What is done in the notebook, and the beginning of the names of the tensors that the ranks get from it, if any.
_TOUCHES: dict[str, tuple[Callable[[Notebook], object], str | None]] = {
    "learning rate": (_set_rate, None),
    "new SGD": (_new_sgd, None),
    "new Adam": (_new_adam, None),
    "push opt": (lambda notebook: notebook.push("opt"), None),
    "eval": (lambda notebook: notebook["model"].eval(), None),
    "freeze": (lambda notebook: notebook["model"][0].requires_grad_(False), None),
    "pull model": (lambda notebook: notebook.pull("model"), None),
    "pull model and opt": (lambda notebook: notebook.pull("model", "opt"), None),
    "pull, then push": (_pull_then_push, None),
    "pull, then learning rate": (_pull_then_set_rate, None),
    "push both": (lambda notebook: notebook.push("model", "opt"), ""),
    "load": (_load, ""),
    "fill": (_fill, "2.weight"),
}


@pytest.mark.parametrize("touch", _TOUCHES)
def test_training_goes_on_after(touch: str, notebook: Notebook) -> None:
    first = notebook.shown(_TRAIN)
    assert first["is_together"] and first["losses"][-1] < first["losses"][0]
    wanted = notebook.session.pull_all("model", ranks=[1])[0]["model"].state_dict()
    act, replaced = _TOUCHES[touch]
    act(notebook)
    if replaced is not None:
        new = notebook["model"].state_dict()
        wanted |= {name: value for name, value in new.items() if name.startswith(replaced)}
    came = notebook.shown("{name: value.tolist() for name, value in model.state_dict().items()}")
    assert came == {name: value.tolist() for name, value in wanted.items()}
    second = notebook.shown(_TRAIN)
    assert second["is_together"] and second["losses"][-1] < second["losses"][0]
    assert notebook.shown("[torch.equal(*pair) for pair in zip(before, model.parameters())][-2:]") == [False, False]


def test_changed_optimizer_keeps_the_ranks_momenta(notebook: Notebook) -> None:
    momenta = "[round(state['exp_avg'].sum().item(), 6) for state in opt.state.values()]"
    notebook.shown(_TRAIN)
    was = notebook.shown(momenta)
    _set_rate(notebook)
    assert notebook.shown("opt.param_groups[0]['lr']") == 0.02
    assert notebook.shown(momenta) == was
    notebook.push("opt")  # the notebook's optimizer has never moved
    assert notebook.shown(momenta) == []


def test_optimizer_of_new_weights_keeps_what_the_ranks_have_set(notebook: Notebook) -> None:
    notebook.session.execute(_TRAIN + "\ndecay = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)\ndecay.step()")
    _load(notebook)
    assert notebook.shown(_TRAIN)["is_together"]
    assert notebook.shown("opt.param_groups[0]['lr'], decay.optimizer is opt") == (0.005, True)


def test_mode_of_a_model_with_many_weights(notebook: Notebook) -> None:
    notebook["model"] = torch.nn.Sequential(torch.nn.Linear(2, 4000), torch.nn.Linear(4000, 1))
    notebook["opt"] = torch.optim.SGD(notebook["model"].parameters(), lr=1e-5)
    assert notebook.shown(_TRAIN)["is_together"]
    notebook["model"].eval().requires_grad_(False)[1].requires_grad_()
    assert notebook.shown("model.training, [p.requires_grad for p in model.parameters()]") == (
        False, [False, False, True, True],
    )  # fmt: skip
    assert notebook.shown(_TRAIN)["is_together"]


def test_mode_arrives_without_the_notebooks_buffers(notebook: Notebook) -> None:
    notebook.shown(_TRAIN)
    notebook.shown("model.double(), xs.dtype\n0")  # replaces the buffers by others, as a move to a device does
    trained = notebook.shown("model[1].running_mean.tolist()")
    notebook["model"].eval()
    assert notebook.shown("model.training, model[1].running_mean.tolist(), str(model[1].running_mean.dtype)") == (
        False, trained, "torch.float64",
    )  # fmt: skip


def test_schedule_of_the_notebook_drives_the_ranks_optimizer(notebook: Notebook) -> None:
    notebook.shown(_TRAIN)
    _schedule(notebook)
    notebook.shown(_TRAIN)
    assert notebook.shown("schedule.step()\nopt.param_groups[0]['lr'], schedule.optimizer is opt") == (0.005, True)
    _set_rate(notebook)
    notebook.shown(_TRAIN)
    assert notebook.shown("schedule.step()\nopt.param_groups[0]['lr'], schedule.optimizer is opt")[1]


def test_tensor_that_an_optimizer_moves(notebook: Notebook) -> None:
    notebook["other"] = torch.zeros(3, requires_grad=True)
    notebook["opt"] = torch.optim.SGD([notebook["other"]], lr=1.0)
    step = "other.sum().backward()\nopt.step()\nopt.zero_grad()\nother.tolist()"
    assert notebook.shown(step) == [-1.0] * 3
    with torch.no_grad():
        notebook["other"].fill_(5.0)
    assert notebook.shown(step) == [4.0] * 3
    notebook["other"] = torch.zeros(3)  # another tensor, which no optimizer has
    assert notebook.shown("other.tolist()") == [0.0] * 3


def test_name_bound_to_another_object_that_the_ranks_have(notebook: Notebook) -> None:
    notebook["other"] = torch.nn.Linear(2, 2)
    notebook.shown(_TRAIN)
    notebook.shown("0 * other.in_features")
    notebook["other"] = notebook["model"]
    assert notebook.shown("other is model") is True


def test_what_a_pull_brings_is_not_sent_again(notebook: Notebook, capsys: pytest.CaptureFixture[str]) -> None:
    notebook.shown(_TRAIN)
    notebook.shown("kept = model, opt\n0")
    notebook.pull("model")
    capsys.readouterr()
    assert notebook.shown("model is kept[0], opt is kept[1]") == (True, True)
    notebook.pull("opt")
    assert notebook.shown("model is kept[0], opt is kept[1]") == (True, True)
    assert capsys.readouterr().err == ""
    notebook["other"] = {"model": notebook["model"]}
    assert notebook.shown("other['model'] is kept[0]") is True


def test_pulled_model_of_the_ranks_gets_an_optimizer_in_the_notebook(notebook: Notebook) -> None:
    notebook.session.execute("torch.manual_seed(0)\nmodel = torch.nn.Linear(2, 1)")
    notebook.pull("model")
    notebook["opt"] = torch.optim.SGD(notebook["model"].parameters(), lr=0.01)
    trained = notebook.shown(_TRAIN)
    assert trained["is_together"] and trained["losses"][-1] < trained["losses"][0]


def test_values_of_one_rank_do_not_count_as_those_of_another(notebook: Notebook) -> None:
    notebook.session.execute("share = torch.tensor([rank])")
    notebook["other"] = notebook.session.pull("share", rank=1)
    assert notebook.shown("other.tolist()") == [1]


@pytest.mark.parametrize("touch", ["pull model", "push both", "fill", "learning rate"])
def test_prepared_objects_and_the_ranks_objects_are_one(touch: str, notebook: Notebook) -> None:
    notebook.session.execute(_PREPARE)
    assert notebook.shown("train()[0], accelerator.unwrap_model(net) is model") == (True, True)
    _TOUCHES[touch][0](notebook)
    before = notebook.shown("model, opt\nnet(xs).mean().item()")
    rate = notebook["opt"].param_groups[0]["lr"]
    assert notebook.shown("optim.optimizer is opt, optim.param_groups[0]['lr']") == (True, rate)
    is_same, after = notebook.shown("train()")
    assert is_same and abs(after - 5) < abs(before - 5)
    if touch in ("pull model", "fill"):
        assert notebook.shown("accelerator.unwrap_model(net) is model") is True


def test_push_of_a_sharded_model_writes_into_its_shares(notebook: Notebook) -> None:
    notebook.session.execute("""
from notebook_accel import Accelerator, FullyShardedDataParallelPlugin
sharding = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
net, optim = sharding.prepare(model, opt)
""")
    _load(notebook)
    notebook.push("model")
    pulled = notebook.session.pull("net")
    assert [p.tolist() for p in pulled.parameters()] == [p.tolist() for p in notebook["model"].parameters()]
    _set_rate(notebook)
    trained = "net(xs).sum().backward()\noptim.step()\nopt.param_groups[0]['params'] == list(net.parameters())"
    assert notebook.shown(trained) is True
    assert notebook.shown("opt is optim.optimizer, optim.param_groups[0]['lr']") == (True, 0.02)


def test_optimizer_gets_settings_and_keeps_what_only_the_ranks_have() -> None:
    first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    opt = torch.optim.SGD([first], lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=10)
    opt.param_groups[0]["foreach"], state = False, opt.state
    new = torch.optim.SGD([first], lr=0.5, nesterov=True, momentum=0.9)
    new.add_param_group({"params": [second], "lr": 0.7})
    shared_parts.set_up(opt, new.defaults, new.param_groups, None, [])
    assert [group["lr"] for group in opt.param_groups] == [0.5, 0.7] and opt.state is state
    assert opt.param_groups[0]["nesterov"] and opt.param_groups[0]["foreach"] is False
    known = shared_parts.settings(new.param_groups)
    opt.param_groups[0]["lr"] = 0.05  # as a schedule of the ranks does
    new.param_groups[0]["weight_decay"] = 0.1
    shared_parts.set_up(opt, new.defaults, new.param_groups, None, known)
    assert (opt.param_groups[0]["lr"], opt.param_groups[0]["weight_decay"]) == (0.05, 0.1)
    opt.step()
    first.data = first.data.double()
    shared_parts.set_up(opt, new.defaults, new.param_groups[:1], {first: {"momentum_buffer": torch.ones(2)}}, [])
    assert len(opt.param_groups) == 1 and list(opt.state) == [first]
    assert opt.state[first]["momentum_buffer"].dtype == torch.float64  # as for the parameter, which prepare may move
    schedule.step()


def test_pushed_class_and_function_arrive_as_they_are_now(notebook: Notebook) -> None:
    made: dict[str, Any] = {"__name__": "__main__"}
    exec("class Options:\n    rate, words = 1, []\ndef listed(x, rest=[]): return [x, *rest]", made)
    notebook["other"], notebook["schedule"] = made["Options"], made["listed"]
    used = "other.rate, other.words, schedule(1)"
    assert notebook.shown(used) == (1, [], [1])
    notebook.session.execute("instance = other()")
    made["Options"].rate = 2
    made["Options"].words.append("new")
    made["listed"].__defaults__[0].append(5)
    notebook.push("other", "schedule")
    assert notebook.shown(used) == (2, ["new"], [1, 5])
    assert notebook.shown("isinstance(instance, other), instance.rate") == (True, 2)
    assert type(notebook.session.pull("instance")) is made["Options"]


def test_model_that_makes_its_tensors_anew_when_it_is_unpickled(notebook: Notebook) -> None:
    notebook["other"] = Remade()
    assert notebook.shown("other.weight.tolist()") == [0.0]
    notebook["other"].eval()
    assert notebook.shown("other.weight.tolist()") == [0.0]


def test_delivery_that_fails_leaves_model_and_optimizer_together(notebook: Notebook) -> None:
    notebook.shown(_TRAIN)
    notebook["other"] = Unopenable()
    _set_rate(notebook)
    with pytest.raises(RankFailedError, match="can't be opened here"):
        notebook.push("opt", "other")
    notebook["other"] = None
    second = notebook.shown(_TRAIN)
    assert second["is_together"] and second["losses"][-1] < second["losses"][0]
    assert notebook.shown("opt.param_groups[0]['lr']") == 0.02


@pytest.mark.slow
def test_restarted_rank_beside_one_that_goes_on_training() -> None:
    main = vars(sys.modules["__main__"])
    with Session(num_processes=2, use_cpu=True, view="none") as session:
        main["model"] = torch.nn.Linear(2, 1)
        main["opt"] = torch.optim.SGD(main["model"].parameters(), lr=0.01)
        main["xs"] = torch.ones(4, 2)
        try:
            session.execute(f"import torch\n{_TRAIN}")
            session.restart([1])
            main["opt"].param_groups[0]["lr"] = 0.02
            session.execute("opt", ranks=None)  # rank 1 gets the optimizer before the model, and rank 0 only its change
            shown = session.execute(f"import torch\n{_TRAIN}")
            assert [ast.literal_eval(shown[rank])["is_together"] for rank in range(2)] == [True, True]
        finally:
            for name in ("model", "opt", "xs"):
                del main[name]
