"""One tracker for each library that people track runs with, as small as the library allows."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from notebook_accel.training.trackers import Images, LibraryTracker, Table, guarded, plain


class WandBTracker(LibraryTracker):
    """Weights & Biases; ``options`` are those of ``wandb.init``."""

    name = module = "wandb"

    def _open(self) -> Any:
        return self.library.init(project=self.run_name, **self.options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: Images, step: int | None = None, **kwargs: Any) -> None:
        self.run.log(
            {name: [self.library.Image(image) for image in images] for name, images in values.items()},
            step=step,
            **kwargs,
        )

    def _write_table(self, table: Table, **kwargs: Any) -> None:
        given = {"columns": table.columns, "data": table.rows, "dataframe": table.dataframe}
        made = self.library.Table(**{name: value for name, value in given.items() if value is not None})
        self.run.log({table.name: made}, step=table.step, **kwargs)

    def finish(self) -> None:
        self.run.finish()


class TrackioTracker(WandBTracker):
    """Trackio; ``options`` are those of ``trackio.init``."""

    name = module = "trackio"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.run.log({name: plain(value) for name, value in values.items()}, step=step, **kwargs)

    def log_images(self, values: Images, step: int | None = None, **kwargs: Any) -> None:
        """Write images under names of their own, since Trackio takes no lists: ``digit``, ``digit/1`` and so on."""
        for name, images in values.items():
            named = {f"{name}/{number}" if number else name: image for number, image in enumerate(images)}
            self.run.log({key: self.library.Image(image) for key, image in named.items()}, step=step, **kwargs)


class SwanLabTracker(WandBTracker):
    """SwanLab; ``options`` are those of ``swanlab.init``."""

    name = module = "swanlab"
    store_init_configuration = TrackioTracker.store_init_configuration
    log = TrackioTracker.log
    _write_table = LibraryTracker._write_table


class CometMLTracker(LibraryTracker):
    """Comet; ``options`` are those of ``comet_ml.start``, such as ``online=False``."""

    name = module = "comet_ml"

    def _open(self) -> Any:
        return self.library.start(project_name=self.run_name, **self.options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.log_parameters(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                self.run.log_metrics(value, step=step, **kwargs)
            elif isinstance(value, str):
                self.run.log_other(name, value, **kwargs)
            else:
                self.run.log_metric(name, plain(value), step=step, **kwargs)

    def log_images(self, values: Images, step: int | None = None, **kwargs: Any) -> None:
        for name, images in values.items():
            for image in images:
                self.run.log_image(image, name=name, step=step, **kwargs)

    def _write_table(self, table: Table, **kwargs: Any) -> None:
        rows, headers = (table.rows, table.columns or False) if table.dataframe is None else (table.dataframe, True)
        self.run.log_table(f"{table.name}.csv", tabular_data=rows, headers=headers, **kwargs)

    def finish(self) -> None:
        self.run.end()


class MLflowTracker(LibraryTracker):
    """MLflow. The run is in the experiment ``MLFLOW_EXPERIMENT_NAME``, or else in one with the project's name.

    Args:
        experiment_name: The experiment, which is made if there is none of that name.
        logging_dir: The folder of a new experiment's artifacts, by default the server's or the store's.
        nested_run: Make the run a part of the active one.
        options: Arguments of ``mlflow.start_run``, such as ``run_name``.
    """

    name = module = "mlflow"
    _PARAMETERS = 100  # that a store takes at once
    _CHARACTERS = 6000  # of a parameter

    def __init__(
        self,
        experiment_name: str = "",
        logging_dir: str | os.PathLike[str] | None = None,
        nested_run: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(experiment_name, nested=nested_run, **options)
        self._artifacts = None if logging_dir is None else str(logging_dir)

    def _open(self) -> Any:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.run_name
        experiment = self.library.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self.library.create_experiment(name, self._artifacts)
        return self.library.start_run(experiment_id=number, **self.options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        texts = [(name, str(value)[: self._CHARACTERS]) for name, value in values.items()]
        for start in range(0, len(texts), self._PARAMETERS):
            self.library.log_params(dict(texts[start : start + self._PARAMETERS]), run_id=self._run_id)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write numbers as metrics, and text as tags of the run, since metrics are numbers only."""
        metrics = {name: plain(value) for name, value in values.items()}
        tags = {name: metrics.pop(name) for name in list(metrics) if isinstance(metrics[name], str)}
        self.library.log_metrics(metrics, step=step, run_id=self._run_id, **kwargs)
        if tags:
            self.library.set_tags(tags)

    @property
    def _run_id(self) -> Any:
        return self.run.info.run_id

    def log_images(self, values: Images, step: int | None = None, **kwargs: Any) -> None:
        for name, images in values.items():
            for image in images:
                self.library.log_image(image, key=name, step=step, **kwargs)

    def _write_table(self, table: Table, **kwargs: Any) -> None:
        by_column = dict(zip(table.columns or (), map(list, zip(*(table.rows or ()), strict=True)), strict=False))
        made = by_column if table.dataframe is None else table.dataframe
        self.library.log_table(made, f"{table.name}.json", run_id=self._run_id, **kwargs)

    @guarded
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Call ``mlflow.log_figure``."""
        self.library.log_figure(figure, artifact_file, **save_kwargs)

    @guarded
    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Call ``mlflow.log_artifact``."""
        self.library.log_artifact(local_path, artifact_path, run_id=self._run_id)

    @guarded
    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Call ``mlflow.log_artifacts``."""
        self.library.log_artifacts(local_dir, artifact_path, run_id=self._run_id)

    def finish(self) -> None:
        self.library.end_run()


class FolderTracker(LibraryTracker):
    """A tracker whose library writes to the folder of the project.

    Args:
        run_name: The run's name.
        logging_dir: The folder.
        options: Arguments of the library's function that begins a run.
    """

    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str] = ".", **options: Any) -> None:
        super().__init__(run_name, **options)
        self.logging_dir = pathlib.Path(logging_dir)


class AimTracker(FolderTracker):
    """Aim; ``options`` are those of ``aim.Run``. The folder is the repository."""

    name = module = "aim"

    def _open(self) -> Any:
        run = self.library.Run(repo=str(self.logging_dir), **self.options)
        run.name = self.run_name
        return run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run["hparams"] = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        for name, value in values.items():
            self.run.track(self.library.Text(value) if isinstance(value, str) else plain(value), name, step, **kwargs)

    def log_images(self, values: Images, step: int | None = None, **kwargs: Any) -> None:
        """Write images; a value can also be one image, or a pair of an image and its caption."""
        for name, given in values.items():
            for item in given if isinstance(given, list) else [given]:
                image, caption = item if isinstance(item, tuple) else (item, "")
                self.run.track(self.library.Image(image, caption=caption), name, step, **kwargs)

    def finish(self) -> None:
        self.run.close()


class TensorBoardTracker(FolderTracker):
    """TensorBoard; ``options`` are those of ``torch.utils.tensorboard.SummaryWriter``."""

    name = "tensorboard"
    module = "torch.utils.tensorboard"  # needs the package tensorboard

    def _open(self) -> Any:
        return self.library.SummaryWriter(self.logging_dir / self.run_name, **self.options)

    @property
    def writer(self) -> Any:
        """The ``SummaryWriter``."""
        return self.run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        shown = {name: value if isinstance(value, (int, float, bool)) else str(value) for name, value in values.items()}
        self.run.add_hparams(shown, metric_dict={}, run_name=".")
        self.run.flush()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                self.run.add_text(name, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self.run.add_scalars(name, value, global_step=step, **kwargs)
            else:
                self.run.add_scalar(name, plain(value), global_step=step, **kwargs)
        self.run.flush()

    def log_images(self, values: Images, step: int | None = None, **kwargs: Any) -> None:
        """Write batches of images of shape ``(n, channels, height, width)``, or with ``dataformats="NHWC"``."""
        for name, images in values.items():
            self.run.add_images(name, images, global_step=step, **kwargs)

    def finish(self) -> None:
        self.run.close()


class ClearMLTracker(LibraryTracker):
    """ClearML; ``options`` are those of ``clearml.Task.init``. A task that is active already is used and left open."""

    name = module = "clearml"
    _is_own = True

    def _open(self) -> Any:
        task = self.library.Task.current_task()
        self._is_own = task is None
        return task or self.library.Task.init(**{"project_name": self.run_name, **self.options})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.connect_configuration(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        logger = self.run.get_logger()
        for name, value in values.items():
            if isinstance(value, str):
                logger.report_text(f"{name}: {value}", **kwargs)
            elif step is None:
                logger.report_single_value(name, plain(value), **kwargs)
            else:
                logger.report_scalar(**_titled(name), value=plain(value), iteration=step, **kwargs)

    def log_images(self, values: Images, step: int | None = None, **kwargs: Any) -> None:
        for name, images in values.items():
            for image in images:
                self.run.get_logger().report_image(**_titled(name), iteration=step, image=image, **kwargs)

    def _write_table(self, table: Table, **kwargs: Any) -> None:
        rows = [*([table.columns] if table.columns else []), *(table.rows or [])]
        made = rows if table.dataframe is None else table.dataframe
        self.run.get_logger().report_table(**_titled(table.name), iteration=table.step, table_plot=made, **kwargs)

    def finish(self) -> None:
        if self._is_own:
            self.run.close()


def _titled(name: str) -> dict[str, str]:
    """Return ClearML's title and series: ``eval_loss`` belongs to the graph ``loss`` as its series ``eval``."""
    series, _, title = name.partition("_")
    return (
        {"title": title, "series": series}
        if series in ("train", "eval", "test") and title
        else {
            "title": name,
            "series": "train",
        }
    )


class DVCLiveTracker(LibraryTracker):
    """DVCLive; ``options`` are those of ``dvclive.Live``, or ``live``, an object that exists already."""

    name = module = "dvclive"

    def _open(self) -> Any:
        return self.options.get("live") or self.library.Live(**self.options)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.log_params(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write the values, and begin the next step."""
        if step is not None:
            self.run.step = step
        for name, value in values.items():
            self.run.log_metric(name, plain(value), **kwargs)
        self.run.next_step()

    def log_images(self, values: Images, step: int | None = None, **kwargs: Any) -> None:
        if step is not None:
            self.run.step = step
        for name, images in values.items():
            for number, image in enumerate(images):
                self.run.log_image(f"{name}/{number}.png", image, **kwargs)

    def finish(self) -> None:
        self.run.end()
