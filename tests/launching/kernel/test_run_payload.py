"""Messages about variables that go to the ranks and variables that stay behind, in a real notebook."""

from __future__ import annotations

from tests import kernels


def test_large_names_are_listed_with_their_sizes(notebook: kernels.Kernel) -> None:
    notebook.run("model = torch.nn.Linear(5000, 10_000)\ndata = torch.ones(30_000_000)")
    notebook.run("small = torch.ones(3, dtype=torch.float64)")
    outcome = notebook.run("""%%distributed -n 2
with torch.no_grad():
    model.weight.zero_()
float(model.weight.sum() + data.sum() + small[0])""")
    assert outcome.result == "[30000001.0, 30000001.0]", outcome.traceback
    assert outcome.stdout.startswith(
        "Sending to the ranks: model 191 MiB, data 114 MiB\nLaunching training on 2 CPUs.\n"
    )
    assert notebook.value("bool(model.weight.abs().sum() > 0)") == "True"
    notebook.run("del model, data")


def test_arguments_are_listed_too_and_small_ones_not(notebook: kernels.Kernel) -> None:
    outcome = notebook.run("""from notebook_accel import notebook_launcher
def train(data, lr=1): return len(data)
notebook_launcher(train, (bytes(200_000_000),), 1, kwargs={"lr": 2}, use_cpu=True)[0]""")
    assert outcome.result == "200000000", outcome.traceback
    assert "Sending to the ranks: argument 0 191 MiB\n" in outcome.stdout


def test_tensor_with_a_graph_is_sent_without_it_and_that_is_said(notebook: kernels.Kernel) -> None:
    notebook.run("w = torch.ones(3, requires_grad=True)\nfeatures = w * 2")
    outcome = notebook.run("%%distributed -n 1\nfeatures.requires_grad, features.sum().item(), w.requires_grad")
    assert outcome.result == "[(False, 6.0, True)]", outcome.traceback
    assert outcome.stderr == "Sent without the graph of their gradients: features\n"


def test_object_that_answers_for_every_attribute_has_no_graph(notebook: kernels.Kernel) -> None:
    notebook.run("""class Proxy:
    def __getattr__(self, name):
        if name.startswith("__"): raise AttributeError(name)
        return name
proxy = Proxy()""")
    outcome = notebook.run("%%distributed -n 1\nproxy.grad_fn")
    assert outcome.result == "['grad_fn']", outcome.traceback
    assert outcome.stderr == ""


def test_name_that_is_only_shadowed_may_be_what_cannot_be_sent(notebook: kernels.Kernel) -> None:
    notebook.run("log = open('/dev/null', 'w'); batches = (i for i in range(3)); kept = 5")
    outcome = notebook.run("""%%distributed -n 2
def total(): return sum(batches) + kept
if kept:
    batches = [1, 2]
    log = "mine"
total(), log""")
    assert outcome.result == "[(8, 'mine'), (8, 'mine')]", outcome.traceback


def test_shadowed_name_that_is_read_after_all_is_explained(notebook: kernels.Kernel) -> None:
    notebook.run("log = open('/dev/null', 'w'); kept = 0")
    outcome = notebook.run("%%distributed -n 1\nif kept:\n    log = 1\nlog.read()")
    assert outcome.error_name == "RankFailedError"
    assert "name 'log' is not defined" in outcome.traceback
    assert "assign 'log' in the cell before it is used" in outcome.traceback
    assert 'global "log" can\'t be sent to another process: it is an open file' in outcome.traceback


def test_name_that_the_cell_does_not_assign_is_still_refused(notebook: kernels.Kernel) -> None:
    notebook.run("log = open('/dev/null', 'w')")
    for cell in ("%%distributed -n 1\nlog.read()", "%%distributed -n 1 --push log\nlog = 1"):
        assert notebook.run(cell).error_name == "PayloadError"
