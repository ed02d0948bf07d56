from __future__ import annotations

import importlib.util
import json
import pathlib
from typing import Any

import numpy as np
import pytest
import torch

from notebook_accel import Accelerator, ConfigError
from notebook_accel.tracking import GeneralTracker, MLflowTracker, TensorBoardTracker
from notebook_accel.training import tracking
from tests.training.ranks import Ranks, on_ranks


class Own:
    name = "own"

    def __init__(self) -> None:
        self.said: list[Any] = []

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.said.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.said.append((values, step, kwargs))

    def finish(self) -> None:
        self.said.append("finished")


def test_lines_of_json(tmp_path: pathlib.Path) -> None:
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    assert accelerator.trackers == []
    accelerator.init_trackers("digits", {"lr": 0.1, "path": tmp_path})
    accelerator.log({"loss": torch.tensor([0.5]), "note": "fine"}, step=3)
    accelerator.log(
        {"loss": torch.tensor(0.25), "peak": torch.tensor(float("inf"))}, log_kwargs={"jsonl": {"split": "test"}}
    )
    tracker, path = accelerator.get_tracker("jsonl"), accelerator.get_tracker("jsonl", unwrap=True)
    accelerator.log({"step": 7, "time_s": 1.5}, step=3)
    accelerator.log({"step": 7})
    tracker.log_table("results", ["name", "score"], [["a", np.float32(0.5)]], step=4)
    with pytest.warns(UserWarning, match="'jsonl' failed in log_images.*it has no images"):
        tracker.log_images({"digits": [np.zeros((8, 8, 3))]})
    accelerator.end_training()
    first, second, named_like_ours, own_step, table = map(json.loads, path.read_text().splitlines())
    assert (named_like_ours["step"], named_like_ours["step_"], named_like_ours["time_s_"]) == (3, 7, 1.5)
    assert own_step["step"] == 7
    assert (table["step"], table["results"]) == (4, {"columns": ["name", "score"], "data": [["a", 0.5]]})
    assert (first["loss"], first["note"], first["step"]) == (0.5, "fine", 3)
    assert (second["loss"], second["split"], second["step"]) == (0.25, "test", None)
    assert second["peak"] is None  # JSON has no infinity
    assert json.loads((tmp_path / "digits" / "hparams.json").read_text()) == {"lr": 0.1, "path": str(tmp_path)}


@on_ranks(2)
def test_only_rank_0_tracks(tmp_path: pathlib.Path) -> None:
    own = Own()
    accelerator = Accelerator(cpu=True, log_with=[own, "jsonl"], project_dir=tmp_path)
    accelerator.init_trackers("run", {"a": 1})
    accelerator.log({"loss": 1.0}, step=2, log_kwargs={"own": {"more": True}})
    accelerator.get_tracker("own").log({"by hand": 1})
    accelerator.wait_for_everyone()
    rank = accelerator.process_index
    accelerator.end_training()
    said = [{"a": 1}, ({"loss": 1.0}, 2, {"more": True}), ({"by hand": 1}, None, {}), "finished"]
    assert own.said == (said if rank == 0 else [])
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


@on_ranks(2)
def test_a_run_that_is_read_on_another_rank() -> None:
    """Read the run as programs do that were written for one process."""
    accelerator = Accelerator(cpu=True, log_with=Own())
    accelerator.init_trackers("run")
    if not accelerator.is_main_process:
        run = accelerator.get_tracker("own", unwrap=True)
        run.name = "first"
        with run.start_span("epoch") as span:
            span.config["lr"] = 0.1
        assert next(iter(run.tags), "none") == "none"  # the next line would take all memory otherwise
        assert (run.name, [*run.tags], dict(run.config), bool(run)) == ("first", [], {}, False)
        assert "lr" not in run.config
        with pytest.raises(TypeError, match="NotOnThisRank"):
            json.dumps(run.active_run.to_dictionary())
        with pytest.raises(TypeError, match="NotOnThisRank"):
            pathlib.Path(run.dir)
    accelerator.end_training()


def test_what_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match="'neptune', and there is no such tracker"):
        Accelerator(log_with=["jsonl", "neptune"], project_dir=tmp_path)
    with pytest.raises(ConfigError, match="there is no folder"):
        Accelerator(log_with="jsonl")
    with pytest.raises(ConfigError, match="object, which isn't a tracker"):
        Accelerator(log_with=object())
    accelerator = Accelerator(log_with=Own())
    accelerator.init_trackers("run")
    with pytest.raises(ConfigError, match="no tracker 'jsonl'") as raised:
        accelerator.get_tracker("jsonl")
    assert "'own'" in raised.value.fix


def test_all_that_there_are(tmp_path: pathlib.Path) -> None:
    there = tracking.resolve(["all", "jsonl"], str(tmp_path))
    assert "jsonl" in there
    assert len(set(there)) == len(there)
    assert ("tensorboard" in there) == (importlib.util.find_spec("tensorboard") is not None)


@pytest.mark.skipif(importlib.util.find_spec("comet_ml") is not None, reason="comet_ml is there")
def test_a_library_that_is_not_installed() -> None:
    with pytest.raises(ConfigError, match="isn't installed") as raised:
        Accelerator(log_with=tracking.LoggerType.COMETML)
    assert raised.value.fix == "pip install comet-ml"


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard isn't there")
def test_tensorboard(tmp_path: pathlib.Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accelerator = Accelerator(log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run", {"lr": 0.1, "layers": [1, 2]})
    accelerator.log({"loss": torch.tensor(0.5), "note": "fine"}, step=1)
    tracker = accelerator.get_tracker("tensorboard")
    with pytest.warns(UserWarning, match=r"failed in log\({'many': ...}\), and training goes on"):
        accelerator.log({"many": torch.ones(2), "loss": 0.25, "both": {"a": 1, "b": 2}}, step=2)
    tracker.has_failed = False
    tracker.log_images({"digits": torch.rand(2, 8, 8, 3)}, step=2, dataformats="NHWC")
    assert accelerator.get_tracker("tensorboard", unwrap=True) is tracker.writer
    with pytest.warns(UserWarning, match="failed in log_table, and training goes on"):
        tracker.log_table("results", columns=["a"], data=[[1]])
    tracker.log_table("results", columns=["a"], data=[[1]])  # says so once
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 0.25)]
    assert [event.step for event in events.Images("digits")] == [2]


class Registered(GeneralTracker):
    """A tracker that is written as in Accelerate's documentation."""

    name = "registered"

    @tracking.on_main_process
    def __init__(self, run_name: str) -> None:
        self.said: list[Any] = [run_name]

    @tracking.on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.said.append((values, step))


@on_ranks(2)
def test_a_class_that_was_registered() -> None:
    tracking.register_tracker_class(Registered)
    accelerator = Accelerator(cpu=True, log_with="registered")
    by_hand = Registered("by hand")
    by_hand.log({"a": 1})
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0}, step=2)
    found = [tracker.said for tracker in accelerator.trackers], vars(by_hand)
    said = [["run", ({"loss": 1.0}, 2)]], {"said": ["by hand", ({"a": 1}, None)]}
    assert found == (said if accelerator.is_main_process else ([], {}))
    accelerator.end_training()
    with pytest.raises(ConfigError, match="object isn't a tracker"):
        tracking.register_tracker_class(object)


def test_all_trackers_without_a_folder() -> None:
    with pytest.warns(UserWarning, match="logs nothing: there is no folder") as said:
        accelerator = Accelerator(cpu=True, log_with="all")
    assert said[0].filename == __file__
    accelerator.init_trackers("run", {"lr": 0.1})
    accelerator.log({"loss": 1.0})
    assert accelerator.trackers == []


class Failing(Own):
    """A tracker of the user's own that fails in every method, as one does whose server is down."""

    name = "failing"

    def start(self) -> None:
        raise ConnectionError("no route to host")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        raise ConnectionError("no route to host")


def test_a_tracker_that_fails_says_so_once_and_the_others_go_on() -> None:
    failing, own = Failing(), Own()
    accelerator = Accelerator(cpu=True, log_with=[failing, own])
    with pytest.warns(UserWarning, match="'failing' failed in start, .*: ConnectionError: no route to host"):
        accelerator.init_trackers("run", {"lr": 0.1})
    accelerator.log({"loss": 1.0})  # a second warning would be an error
    accelerator.end_training()
    assert own.said == [{"lr": 0.1}, ({"loss": 1.0}, None, {}), "finished"]
    assert failing.said == [{"lr": 0.1}, "finished"]


def test_a_library_that_fails_writes_nothing_and_training_goes_on(tmp_path: pathlib.Path) -> None:
    (tmp_path / "run").write_text("a file in the place of the folder")
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    with pytest.warns(UserWarning, match="'tensorboard' failed in start"):
        accelerator.init_trackers("run", {"lr": 0.1})
    accelerator.log({"loss": 1.0})  # a second warning would be an error
    accelerator.get_tracker("tensorboard", unwrap=True).add_scalar("loss", 1.0)
    accelerator.end_training()


def track_on_every_rank(folder: str) -> Any:
    """Use a tracker on every rank, as programs do that forget to ask which one they are."""
    made = TensorBoardTracker("made by hand", folder)
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", made], project_dir=folder)
    accelerator.init_trackers("run")
    tracker, writer = accelerator.get_tracker("tensorboard"), accelerator.get_tracker("tensorboard", unwrap=True)
    tracker.log_images({"digits": torch.rand(1, 3, 8, 8)}, step=1)
    writer.add_scalar("loss", 1.0)
    made.log({"loss": 1.0})
    idle = MLflowTracker("never started")  # its library isn't even there
    idle.log({"loss": 1.0})
    idle.log_table("results", columns=["a"], data=[[1]])
    idle.finish()
    accelerator.end_training()
    return bool(tracker), bool(made.run)


def test_ranks_above_0_write_nothing(two_ranks: Ranks, tmp_path: pathlib.Path) -> None:
    assert two_ranks.run(track_on_every_rank, str(tmp_path)) == [(True, True), (False, False)]
    assert len(list((tmp_path / "run").glob("events*"))) == 1
    assert len(list((tmp_path / "made by hand").glob("events*"))) == 1
