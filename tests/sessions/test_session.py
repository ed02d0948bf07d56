"""Tests of a session: code runs in ranks that stay, and variables are copied when asked for."""

from __future__ import annotations

import gc
import gzip
import itertools
import os
import pathlib
import sys

import pytest
import torch

from notebook_accel import environment
from notebook_accel.errors import CellError, ConfigError, PayloadError, RankFailedError, ResultError
from notebook_accel.launching.kernel import local
from notebook_accel.launching.results import Results
from notebook_accel.sessions.kernel import rank_pool
from notebook_accel.sessions.kernel.session import Session
from tests import kernels, processes


class Pair:
    def __init__(self, left: object, right: object) -> None:
        self.left, self.right = left, right


class BecomesDict:
    def __reduce__(self) -> tuple[type, tuple[dict[str, int]]]:
        return dict, ({"x": 1},)


def scaled(value: float, *, by: float = 1.0) -> tuple[int, float]:
    return int(os.environ["RANK"]), value * by


def fails_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise LookupError("nothing there")


def test_names_stay_from_cell_to_cell_each_rank_its_own(session: Session) -> None:
    session.execute("kept = [rank]")
    session.execute("kept.append(rank * 10)")
    assert [session.pull("kept", rank=rank) for rank in range(2)] == [[0, 0], [1, 10]]
    assert not hasattr(__import__("__main__"), "kept")


def test_value_is_shown_once_where_ranks_have_the_same(session: Session) -> None:
    assert repr(session.execute("6 * 7")) == "ranks 0-1: 42"
    assert repr(session.execute("rank")) == "rank 0: 0\nrank 1: 1"
    assert repr(session.execute("torch.ones(2, 2)")) == "ranks 0-1:\ntensor([[1., 1.],\n        [1., 1.]])"
    assert not session.execute("nothing = 3")
    assert dict(session.execute("rank", ranks=[1])) == {1: "1"}
    assert session.execute("_.shape == (2, 2)", ranks=[0])[0] == "True"  # the last value that there was
    many = session.execute("'x' * 1_000_000")[0]
    assert len(many) < 21_000 and many.endswith("more characters")


@pytest.mark.parametrize("method", ["spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_workers_of_every_start_method_find_the_present_definitions(
    engine: local.LocalEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "OFFSET", 10, raising=False)
    monkeypatch.setattr(main, "of_notebook", None, raising=False)
    exec("def of_notebook(x): return x + OFFSET", vars(main))
    cell = f"""import concurrent.futures, multiprocessing, threading
lock = threading.Lock()
def stays(): return lock
class Own:
    def __init__(self, x): self.x = FACTOR * of_notebook(x)
with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("{method}")) as pool:
    own, number = pool.submit(Own, 1).result(), pool.submit(of_notebook, 1).result()
own.x, type(own) is Own, number"""
    with Session(num_processes=1, use_cpu=True, view="none") as alone:
        assert repr(alone.execute(f"FACTOR = 2\n{cell}")) == "rank 0: (22, True, 11)"
        assert repr(alone.execute(f"FACTOR = 3\n{cell}")) == "rank 0: (33, True, 11)"


def test_some_ranks_only(session: Session) -> None:
    assert repr(session.execute("rank + 5", ranks=[1])) == "rank 1: 6"
    with pytest.raises(ConfigError, match="has no ranks 2-3"):
        session.execute("1", ranks=[1, 2, 3])


def test_name_of_the_notebook_that_only_some_ranks_have_yet(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "only_here", "sent", raising=False)
    assert repr(session.execute("only_here", ranks=[1])) == "rank 1: 'sent'"
    assert repr(session.execute("only_here")) == "ranks 0-1: 'sent'"


def test_deleted_name_of_the_notebook_is_sent_again(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "rate", 0.1, raising=False)
    for cell in ("rate\ndel rate", "rate = 5\ndel rate", "if rank == 0: del rate"):
        session.execute(cell)
        assert repr(session.execute("rate")) == "ranks 0-1: 0.1"
    assert capsys.readouterr().err == ""  # the notebook's value hasn't changed


def test_memory_of_a_deleted_model_is_freed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "large", torch.nn.BatchNorm1d(2), raising=False)
    session.execute("import gc, weakref; held = weakref.ref(large); other = [large]; bias = large.bias")
    for cell in ("del large, other", "held = weakref.ref(large); large.itself = [large]; large = 0", "del large"):
        assert repr(session.execute(f"{cell}\ngc.collect()\nheld() is None")) == "ranks 0-1: True"
    session.execute("bias.data.fill_(9)")
    assert repr(session.execute("large.bias is bias, large.bias[0].item()")) == "ranks 0-1: (True, 9.0)"
    session.execute("large.double(); large.running_mean += 5")  # replaces the buffer
    sys.modules["__main__"].large.eval()  # type: ignore[attr-defined]
    assert repr(session.execute("large.training, large.running_mean[0].item()")) == "ranks 0-1: (False, 5.0)"


def test_object_that_is_another_type_in_a_rank(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "odd", BecomesDict(), raising=False)
    assert repr(session.execute("odd")) == "ranks 0-1: {'x': 1}"  # a dict has no weak references
    assert repr(session.execute("odd is not None")) == "ranks 0-1: True"


def test_output_belongs_to_the_cell(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    session.execute("print('from', rank)\nos.system(f'echo a child of {rank}')\nsys.stdout.write('no end of line')")
    shown = kernels.unfolded(capsys.readouterr().out)
    for rank in range(2):
        mine = [line for line in shown if line.startswith(f"{rank} │ ")]
        assert mine == [f"{rank} │ from {rank}", f"{rank} │ a child of {rank}", f"{rank} │ no end of line"]
    session.execute("pass")
    assert capsys.readouterr().out == ""


def test_of_too_much_output_the_beginning_and_the_end_are_shown(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    session.execute("for number in range(50_000): print('line', number)", ranks=[0])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "  0 │ line 0" and shown[-1] == "  0 │ line 49999"
    assert len(shown) < 5000
    assert [line for line in shown if "47,980 lines left out here" in line]
    session.execute("print('x' * 3_000_000)\nprint('half\\rwhole \\x1b[31mred')", ranks=[0])
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"  0 │ {'x' * 2000} … and 2,998,000 more characters"
    assert second == "  0 │ whole red"


def test_function_is_called_on_all_ranks(session: Session) -> None:
    results = session.run(scaled, 2.5, by=2)
    assert isinstance(results, Results)
    assert results == [(0, 5.0), (1, 5.0)]


def test_push_and_pull_are_by_value(session: Session) -> None:
    weights = torch.arange(100_000.0)
    session.push(weights=weights, view=weights[10:20], words=["a"])
    assert repr(session.execute("view += 1; weights[10:12].tolist(), words")) == "ranks 0-1: ([11.0, 12.0], ['a'])"
    assert weights[10] == 10
    back = session.pull("weights", rank=1)
    assert back[10] == 11 and back.shape == weights.shape
    assert session.pull("rank", "words", rank=1) == (1, ["a"])
    session.push([1], words=["b"])
    assert session.pull_all("words") == [{"words": ["a"]}, {"words": ["b"]}]


def test_two_objects_that_share_memory_still_do(session: Session) -> None:
    whole = torch.arange(10_000.0)
    session.push(whole=whole, part=whole[:5], parts=[whole])
    assert session.execute("part.fill_(7.0)\nwhole[:6].tolist(), parts[0] is whole")[1] == (
        "([7.0, 7.0, 7.0, 7.0, 7.0, 5.0], True)"
    )
    assert whole[0] == 0


def test_what_cannot_be_sent_or_fetched_is_said(session: Session) -> None:
    with open(os.devnull, "wb") as file, pytest.raises(PayloadError, match=r'global "line" -> attribute "left"'):
        session.push(line=Pair(file, 1))
    with pytest.raises(RankFailedError, match="name 'nowhere' is not defined"):
        session.pull("nowhere")
    session.execute("endless, kept = (x for x in [1]), 7")
    with pytest.raises(ResultError, match="can't be sent to another process: it is a generator") as raised:
        session.pull("endless", "kept", rank=1)
    assert str(raised.value).count("Fix: ") == 1
    assert raised.value.values == {1: {"kept": 7}}
    assert session.execute("rank", ranks=[1])[1] == "1"


def test_error_ends_the_cell_for_all_and_the_session_goes_on(session: Session, tmp_path: pathlib.Path) -> None:
    begun = str(tmp_path / "begun")  # on rank 0, which may be slower than the error of the other
    said_by_0 = f"started = True\nif rank == 0: open({begun!r}, 'w').close()\n"
    with pytest.raises(RankFailedError) as raised:
        session.execute(
            f"{said_by_0}while not os.path.exists({begun!r}): time.sleep(0.01)\n"
            "if rank == 1:\n    {}['missing']\ntime.sleep(100)"
        )
    error = raised.value
    assert (error.rank, error.world_size, type(error.__cause__)) == (1, 2, KeyError)
    assert "line 5" in error.remote_traceback and "{}['missing']" in error.remote_traceback
    assert "notebook_accel" not in error.remote_traceback
    assert [(end.rank, end.stopped) for end in error.others] == [(0, True)]
    assert repr(session.execute("started")) == "ranks 0-1: True"


def test_error_of_a_called_function(session: Session) -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 failed.*LookupError: nothing there"):
        session.run(fails_on_rank_1)


@pytest.mark.usefixtures("everybody_fails_alone")
def test_same_error_on_all_ranks_is_the_first_ones(session: Session) -> None:
    with pytest.raises(RankFailedError, match="ZeroDivisionError") as raised:
        session.execute("1 / 0")
    assert not any(end.stopped for end in raised.value.others)


def test_sys_exit_ends_the_cell_and_not_the_rank(session: Session) -> None:
    session.execute("before = 1\nsys.exit()\nbefore = 2")
    assert session.pull("before") == 1
    with pytest.raises(RankFailedError, match="SystemExit: 3"):
        session.execute("sys.exit(3)")


def test_forgotten_fork_does_not_answer_for_its_rank(session: Session) -> None:
    assert repr(session.execute("child = os.fork()\n(child == 0, rank)[1]")) == "rank 0: 0\nrank 1: 1"
    assert repr(session.execute("os.waitpid(child, 0)[1]")) == "ranks 0-1: 0"
    session.execute("child = os.fork()\nif child == 0: raise ValueError('raised in a fork')")
    assert repr(session.execute("os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])")) == "ranks 0-1: 1"
    assert all(session.job.logs(rank).endswith("ValueError: raised in a fork\n") for rank in range(2))


def test_cell_that_is_no_python_is_said_before_anything_runs(session: Session) -> None:
    with pytest.raises(SyntaxError):
        session.execute("x = = 3")
    with pytest.raises(CellError, match="empty"):
        session.execute("# nothing")


def test_completion_knows_the_ranks_names_and_computes_nothing(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_pool, "_LOOKUP_DEADLINE_S", 60.0)  # who types waits less long than this machine may need
    session.execute(
        "class Costly:\n    plain = 3\n    @property\n    def value(self): raise SystemExit\nitem = Costly()\n"
        "net = torch.nn.Sequential(torch.nn.Linear(3, 4))"
    )
    assert session.complete("x = ite") == ["item"]
    assert session.complete("item.") == ["item.plain", "item.value"]
    assert session.complete("item.value.") == []
    assert session.complete("net.state_d") == ["net.state_dict"]
    assert session.complete("missing.") == []
    described = session.describe("net.state_dict") or []
    assert described[0].startswith("Signature: state_dict(") and "Docstring:" in described
    session.execute("vector = torch.ones(2)")
    assert "Shape: (2,), torch.float32" in (session.describe("vector") or [])
    assert session.describe("nothing.there") == []
    busy = session.start("time.sleep(100)", ranks=[1])
    assert session.complete("ite") == [] and session.describe("item") is None
    busy.interrupt()
    assert busy.wait(60)


def test_two_sessions_do_not_meet(session: Session) -> None:
    session.execute("mine = 'first'")
    with Session(num_processes=1, use_cpu=True, view="none") as other:
        with pytest.raises(RankFailedError, match="name 'mine' is not defined"):
            other.execute("mine")
        other.execute("mine = 'second'")
    assert other.is_over
    assert session.pull("mine") == "first"


def test_what_a_session_cannot_be(session: Session) -> None:
    with pytest.raises(ConfigError, match="start_method='inline' can't be used for a session"):
        Session(1, start_method="inline")
    with pytest.raises(ConfigError, match="num_processes"):
        Session(0)


def test_ranks_part_once_and_a_later_seed_holds(session: Session) -> None:
    step = "weight.grad = torch.ones(1)\ntorch.optim.SGD([weight], lr=0.1).step()\n[torch.rand(()).item() for _ in '1']"
    session.execute(f"weight = torch.nn.Parameter(torch.ones(1))\ntorch.manual_seed(rank)\n{step}")
    session.execute("torch.manual_seed(0)")
    torch.manual_seed(0)
    assert str(session.execute(step)) == f"ranks 0-1: [{torch.rand(()).item()}]"


def test_each_cell_counts_its_epochs_anew(session: Session) -> None:
    session.execute("from tests.launching.ranks.training_loops import Training\nmade = Training()")
    session.execute("def train():\n    for _ in range(2):\n        for x, y in made.loader: made.step(x, y)")
    before = session.job.ranks[0].steps or 0
    for steps in (before + 32, before + 64):
        session.execute("train()")
        processes.wait_until(lambda steps=steps: session.job.ranks[0].steps == steps, f"{steps} steps")
        rank = session.job.ranks[0]
        assert (rank.step, rank.total, rank.epoch) == (16, 16, 2)


@pytest.mark.slow
def test_many_cells_leave_nothing(session: Session) -> None:
    held = "descriptors(), threading.active_count()"
    session.execute(
        # The least of several looks: the thread that measures memory has a file open now and then.
        "import gc, threading\ndef descriptors():\n    return min(len(os.listdir('/proc/self/fd')) for _ in range(9))\n"
        "def resident():\n    return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "def objects():\n    gc.collect()\n    return len(gc.get_objects())"
    )
    session.execute("pass")
    objects = [int(session.execute("objects()")[0])]  # also collects what earlier cells have left, on all ranks
    gc.collect()  # what earlier tests have left here may hold files, too
    before = repr(session.execute(held)), len(os.listdir("/proc/self/fd"))
    sizes = [int(session.execute("resident()")[0])]
    for _ in range(4):
        for _ in range(100):
            session.execute("pass")
        objects.append(int(session.execute("objects()")[0]))
    sizes.append(int(session.execute("resident()")[0]))
    assert (repr(session.execute(held)), len(os.listdir("/proc/self/fd"))) == before
    assert sizes[1] - sizes[0] < 4 << 20
    # A quarter of one for each cell; the least of four, since a thread of the rank may import something meanwhile.
    assert min(later - earlier for earlier, later in itertools.pairwise(objects)) < 25


@pytest.mark.slow
def test_ranks_are_to_outlive_a_collective_that_has_failed(engine: local.LocalEngine) -> None:
    """Which variables that takes was read in torch's sources: there is no GPU, and so no NCCL that reads them."""
    names = ["ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT", "WAIT_TIMEOUT_DUMP_MILSEC"]
    with environment.patched({"TORCH_NCCL_ENABLE_MONITORING": "1"}), Session(num_processes=1, use_cpu=True) as own:
        seen = own.execute(f"import os\n' '.join(os.environ['TORCH_NCCL_' + name] for name in {names})")
    assert seen[0] == "'0 1 0 0'"  # what the user has set stays


def test_files_that_a_session_leaves_open_are_whole_when_it_ends(tmp_path: pathlib.Path) -> None:
    with Session(num_processes=2, use_cpu=True, view="none") as session:
        session.execute(f"import gzip, os; os.chdir({str(tmp_path)!r}); rank = os.environ['RANK']")
        session.execute("rows = open('rows' + rank, 'w'); rows.write('text')")
        session.execute("packed = gzip.open('packed' + rank, 'wt'); packed.write('text')")
    for rank in range(2):
        assert (tmp_path / f"rows{rank}").read_text() == "text"
        assert gzip.decompress((tmp_path / f"packed{rank}").read_bytes()) == b"text"


def test_exception_whose_own_methods_raise_ends_no_rank(session: Session) -> None:
    cell = """
class Broken(Exception):
    def __getattribute__(self, name): raise SystemExit
    def __bool__(self): raise SystemExit
    __str__ = __reduce__ = __bool__
raise Broken("the text")"""
    with pytest.raises(RankFailedError, match=r"Broken"):
        session.execute(cell)
    assert repr(session.execute("6 * 7")) == "ranks 0-1: 42"


@pytest.mark.parametrize(("kind", "is_kept"), [("ValueError", True), ("MemoryError", False)])
def test_rank_lets_go_of_what_an_error_for_want_of_memory_had(session: Session, kind: str, is_kept: bool) -> None:
    session.execute("""
import gc, weakref
gc.disable()
class Big: pass
def attempt(kind):
    big = Big()
    known.append(weakref.ref(big))
    raise kind
known = []""")
    with pytest.raises(RankFailedError, match=kind):
        session.execute(f"attempt({kind})")
    assert repr(session.execute("known[0]() is not None")) == f"ranks 0-1: {is_kept}"
    with pytest.raises(RankFailedError, match="KeyError"):
        session.execute("attempt(KeyError)")
    assert repr(session.execute("gc.enable(); [each() is not None for each in known]")) == "ranks 0-1: [False, True]"


def test_folder_that_the_notebook_has_added_to_its_path_since(
    session: Session, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "added_later.py").write_text("answer = 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert repr(session.execute("import added_later; added_later.answer")) == "ranks 0-1: 42"


def test_value_of_a_cell_that_takes_the_interrupt(session: Session, tmp_path: pathlib.Path) -> None:
    shown = session.execute(f"""
import os, pathlib, signal, time
marks, mine = pathlib.Path({str(tmp_path)!r}), os.environ["RANK"]
try:
    (marks / mine).touch()
    while len(list(marks.iterdir())) < 2: time.sleep(0.01)
    if mine == "0": os.kill({os.getpid()}, signal.SIGINT)
    time.sleep(600)
except KeyboardInterrupt:
    found = "saved"
found""")
    assert repr(shown) == "ranks 0-1: 'saved'"
