"""Runs the trackers with the libraries themselves, offline, on two ranks, and reads what they have written.

The libraries are in an environment of their own: ``.ci/trackers`` makes it.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import sqlite3
import struct
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from notebook_accel import Accelerator, environment
from tests import kernels
from tests.training.ranks import Ranks

pytestmark = [pytest.mark.trackers, pytest.mark.timeout(300)]

_LOSSES = {1: 0.5, 2: 0.25}
_QUIET_AIM = {"log_system_params": False, "system_tracking_interval": None}


def offline(folder: str) -> dict[str, str]:
    """Return the variables with which the libraries need no server, and write below ``folder``."""
    return {
        "WANDB_MODE": "offline",
        "WANDB_DIR": folder,
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": f"{folder}/trackio",
        "COMET_OFFLINE_DIRECTORY": folder,
        "COMET_LOGGING_CONSOLE": "error",
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CACHE_DIR": folder,
        "DVC_NO_ANALYTICS": "true",
        "HF_HUB_OFFLINE": "1",
    }


def track(name: str, folder: str, options: dict[str, Any]) -> Any:
    """Train two steps with a tracker, and return whether this rank has a run."""
    with environment.patched(offline(folder)), contextlib.chdir(folder):
        if options.pop("offline directory", False):
            from comet_ml import ExperimentConfig

            options["experiment_config"] = ExperimentConfig(offline_directory=folder)
        accelerator = Accelerator(cpu=True, log_with=name, project_dir=folder)
        accelerator.init_trackers("digits", {"lr": 0.1, "layers": 2}, init_kwargs={name: options})
        for step, loss in _LOSSES.items():
            accelerator.log({"loss": torch.tensor(loss), "accuracy": 1 - loss}, step=step)
        tracker = accelerator.get_tracker(name)
        tracker.log_images({"digit": [np.full((8, 8, 3), 200, np.uint8)]}, step=2)
        if name not in ("aim", "dvclive", "swanlab"):  # they have no tables
            tracker.log_table("confusion", columns=["digit", "count"], data=[[3, 5], [8, 2]], step=2)
        run = accelerator.get_tracker(name, unwrap=True)
        has_run = bool(run is not None and type(run).__name__ != "NotOnThisRank")
        accelerator.end_training()
        if name == "wandb":
            import wandb

            wandb.teardown()  # ends the process that it starts, which otherwise ends with this rank
        return has_run


def wandb_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format: blocks of 32 KiB, and parts with a header of seven bytes."""
    position, whole = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def read_wandb(folder: pathlib.Path) -> Any:
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = folder.glob("wandb/offline-run-*/run-*.wandb")
    losses, config = {}, {}
    for data in wandb_records(path.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        if "loss" in items:
            losses[items["_step"]] = items["loss"]
        for update in (*record.config.update, *record.run.config.update):
            config[update.key or update.nested_key[0]] = json.loads(update.value_json)
    media = path.parent / "files" / "media"
    files = [*media.glob("images/digit_2_*.png"), *media.glob("table/confusion_2_*.table.json")]
    return losses, (config["lr"], config["layers"]), len(files) == 2


def read_aim(folder: pathlib.Path) -> Any:
    from aim import Repo, Run
    from aim.storage.context import Context

    repository = Repo(str(folder))
    [name] = repository.list_all_runs()
    # Opened for writing: what a closed run has is found for reading only once Aim's own interface has indexed it.
    with contextlib.closing(Run(name, repo=repository, **_QUIET_AIM)) as run:
        steps, (values, *_) = run.get_metric("loss", Context({})).data.numpy()
        images = run.get_image_sequence("digit", Context({})).values.values_list()
        assert run.name == "digits"
        return dict(zip(steps, values, strict=True)), (run["hparams", "lr"], run["hparams", "layers"]), len(images) == 1


def read_mlflow(folder: pathlib.Path) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    losses = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "loss")}
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    parameters = (float(run.data.params["lr"]), int(run.data.params["layers"]))
    return losses, parameters, run.info.status == "FINISHED" and files >= {"confusion.json", "images"}


def read_trackio(folder: pathlib.Path) -> Any:
    with contextlib.closing(sqlite3.connect(folder / "trackio" / "digits.db")) as database:
        rows = [(step, json.loads(text)) for step, text in database.execute("SELECT step, metrics FROM metrics")]
        [(text,)] = database.execute("SELECT config FROM configs").fetchall()
    losses = {step: values["loss"] for step, values in rows if "loss" in values}
    found = {name for _, values in rows for name in values}
    config = json.loads(text)
    return losses, (config["lr"], config["layers"]), found >= {"digit", "confusion"}


def read_comet_ml(folder: pathlib.Path) -> Any:
    [path] = folder.glob("*.zip")
    with zipfile.ZipFile(path) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    payloads = [message["payload"] for message in messages]
    metrics = [payload["metric"] for payload in payloads if "metric" in payload]
    losses = {metric["step"]: float(metric["metricValue"]) for metric in metrics if metric["metricName"] == "loss"}
    params = {
        payload["param"]["paramName"]: payload["param"]["paramValue"] for payload in payloads if "param" in payload
    }
    files = " ".join(map(str, payloads))
    return losses, (float(params["lr"]), int(params["layers"])), "confusion.csv" in files and "digit" in files


def read_dvclive(folder: pathlib.Path) -> Any:
    lines = (folder / "dvclive/plots/metrics/loss.tsv").read_text().splitlines()[1:]
    losses = {int(step): float(loss) for step, loss in (line.split("\t") for line in lines)}
    config = yaml.safe_load((folder / "dvclive/params.yaml").read_text())
    return losses, (config["lr"], config["layers"]), (folder / "dvclive/plots/images/digit/0.png").is_file()


def read_swanlab(folder: pathlib.Path) -> Any:
    [run] = folder.glob("swanlog/run-*")
    [log] = run.glob("run-*.swanlab")
    # In a record of its log (protobuf), a name and a step are followed by a number of eight bytes.
    found = re.findall(rb"\n\x04loss\x10(.).*?\*\t\t(.{8})", log.read_bytes(), re.DOTALL)
    losses = {step[0]: struct.unpack("<d", number)[0] for step, number in found}
    config = yaml.safe_load((run / "files" / "config.yaml").read_text())
    return losses, (config["lr"]["value"], config["layers"]["value"]), len([*run.glob("media/image/*.png")]) == 1


def read_clearml(folder: pathlib.Path) -> Any:
    [task] = folder.glob("offline/*/task.json")
    lines = (task.parent / "metrics.jsonl").read_text().splitlines()
    events = [event for line in lines for event in json.loads(line)]
    losses = {event["iter"]: event["value"] for event in events if event["metric"] == "loss"}
    config = json.loads(task.read_text())["configuration"]["General"]["value"]
    values = dict(line.split(" = ") for line in config.splitlines())
    return losses, (float(values["lr"]), int(values["layers"])), {"digit", "confusion"} <= {e["metric"] for e in events}


_TRACKERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "aim": (read_aim, {**_QUIET_AIM}),
    "clearml": (read_clearml, {}),
    "comet_ml": (read_comet_ml, {"online": False, "offline directory": True}),
    "dvclive": (read_dvclive, {"save_dvc_exp": False, "dvcyaml": False}),
    "mlflow": (read_mlflow, {"run_name": "first"}),
    "swanlab": (read_swanlab, {"mode": "offline"}),
    "trackio": (read_trackio, {}),
    "wandb": (read_wandb, {}),
}


@pytest.mark.parametrize("name", _TRACKERS)
def test_one_run_has_what_was_logged(two_ranks: Ranks, tmp_path: pathlib.Path, name: str) -> None:
    read, options = _TRACKERS[name]
    assert two_ranks.run(track, name, str(tmp_path), options, deadline_s=250) == [True, False]
    assert read(tmp_path) == (_LOSSES, (0.1, 2), True)


_BEGIN = {
    "wandb": "import wandb\nrun = wandb.init(project='digits'{})\nwandb.log({{'loss': 1}})",
    "mlflow": "import mlflow\nrun = mlflow.start_run({})\nmlflow.log_metric('loss', 1)",
}


@pytest.mark.parametrize(
    ("name", "options", "warnings"),
    [
        ("wandb", "", 1),
        ("wandb", ", group='all of them'", 0),
        ("wandb", ", mode='offline' if RANK == 0 else 'disabled'", 0),
        ("mlflow", "", 1),
        ("mlflow", "run_id=mlflow.MlflowClient().create_run('0').info.run_id", 0),
    ],
)
def test_ranks_that_make_a_run_each_are_told_of_once(
    tmp_path: pathlib.Path, name: str, options: str, warnings: int
) -> None:
    with kernels.running(tmp_path) as kernel:
        kernel.run(f"%load_ext notebook_accel\nimport os\nos.environ.update({offline(str(tmp_path))})", 120)
        begin, end = _BEGIN[name].format(options), {"wandb": "wandb.finish()", "mlflow": "mlflow.end_run()"}[name]
        kernel.run("import mlflow\nmlflow.MlflowClient().search_experiments()", 120)  # makes its database
        outcome = kernel.run(
            f"%%distributed -n 2 --view lines --name digits\nRANK = int(os.environ['RANK'])\n{begin}\n{end}\n{begin}",
            200,
        )
    assert outcome.status == "ok", outcome.traceback
    assert outcome.stdout.count("makes a run of its own") == warnings


def test_rank_that_raises_after_it_has_begun_a_run_ends_at_once(tmp_path: pathlib.Path) -> None:
    with kernels.running(tmp_path) as kernel:
        kernel.run(f"%load_ext notebook_accel\nimport os\nos.environ.update({offline(str(tmp_path))})", 120)
        assert kernel.run("%%distributed -n 2\nimport wandb", 120).status == "ok"
        outcome = kernel.run(f"%%distributed -n 2\n{_BEGIN['wandb'].format('')}\nraise ValueError('no data')", 50)
    assert "no data" in outcome.traceback
