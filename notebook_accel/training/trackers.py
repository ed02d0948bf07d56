"""Trackers, which write a run's metrics: what all of them do, and what is each library's own.

A tracker's constructor starts nothing, so every rank can call it. ``init_trackers`` starts trackers on rank 0; on other
ranks their methods do nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import operator
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from notebook_accel import code_places
from notebook_accel.formatting import json_text

Images = Mapping[str, Sequence[Any]]


class NotOnThisRank:
    """A null object in place of a library's where nothing is written.

    Each attribute, call and item is another one, it has no items, and ``with`` yields it. Where a program needs a value
    of the library's, such as a path, Python's error has this class's name.
    """

    def __getattr__(self, name: str) -> NotOnThisRank:
        if name.startswith("__"):  # Python itself looks these up, such as to copy or pickle
            raise AttributeError(name)
        return self

    def __call__(self, *_: Any, **__: Any) -> NotOnThisRank:
        return self

    def __getitem__(self, _: Any) -> NotOnThisRank:
        return self

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())  # otherwise Python asks for items without an end

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __bool__(self) -> bool:
        return False


def attempt(tracker: Any, action: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Call a function so that errors don't end training: the first one of a tracker is a warning."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  whatever the library raises, it is no reason to end training
        if not getattr(tracker, "has_failed", False):
            with contextlib.suppress(AttributeError):  # an object with slots warns each time
                tracker.has_failed = True
            code_places.warn(
                f"The tracker {tracker.name!r} failed in {action}, and training goes on without what it doesn't write: "
                f"{type(error).__name__}: {error}"
            )


class GeneralTracker:
    """A tracker that writes nothing. Your own tracker needs these attributes and methods, but needn't be a subclass.

    Attributes:
        name: The name for ``get_tracker``.
        requires_logging_directory: True if the tracker writes files.
    """

    name = "none"
    requires_logging_directory = False
    main_process_only = True  # programs that were written for Accelerate read it

    @property
    def tracker(self) -> Any:
        """The library's own object."""
        return self

    def start(self) -> None:
        """Start the run; ``init_trackers`` calls this on rank 0."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the run's settings."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write the values of a step."""

    def finish(self) -> None:
        """Write all pending values, at the end of the run."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table for ``log_table``: column names and rows, or a pandas data frame."""

    name: str
    columns: list[str] | None
    rows: list[list[Any]] | None
    dataframe: Any
    step: int | None


class LibraryTracker(GeneralTracker):
    """A tracker that writes through a library, which ``start`` imports. The library's errors become warnings.

    The public methods are the same for all libraries and write nothing unless the tracker has started. A subclass has
    the functions with an underscore that its library can do.

    Args:
        run_name: The project's or run's name.
        options: Arguments of the library's function that begins a run.

    Attributes:
        module: The library's name.
        stores: The function that stores the run's settings, from the tracker on.
        ends: The function that ends the run, from the tracker on, or nothing.
        library: The library, idle until the tracker has started.
        run: The library's own object, idle until the tracker has started.
    """

    module = ""
    stores = ""
    ends = "run.close"

    def __init__(self, run_name: str = "", /, **options: Any) -> None:
        self.run_name = run_name
        self.options = options
        self.library: Any = NotOnThisRank()
        self.run: Any = NotOnThisRank()

    @property
    def tracker(self) -> Any:
        return self.run

    def start(self) -> None:
        self.library = importlib.import_module(self.module)
        self.run = self._begin()

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write("store_init_configuration", self._store, values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._write("log", self._log, values, step, **kwargs)

    def log_images(self, values: Images, step: int | None = None, **kwargs: Any) -> None:
        """Write lists of images, as arrays of shape ``(height, width, channels)`` or as PIL's images.

        Args:
            values: The lists by name.
            step: The step.
            kwargs: Further arguments of the library's function.
        """
        self._write("log_images", self._log_images, values, step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Write a table.

        Args:
            table_name: The table's name.
            columns: The names of the columns.
            data: The rows.
            dataframe: A pandas data frame in place of ``columns`` and ``data``.
            step: The step.
            kwargs: Further arguments of the library's function.
        """
        self._write("log_table", self._log_table, Table(table_name, columns, data, dataframe, step), **kwargs)

    def finish(self) -> None:
        if self.ends:
            self._write("finish", self._call, self.ends)

    def _write(self, action: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self.run, NotOnThisRank):
            attempt(self, action, function, *args, **kwargs)

    def _begin(self) -> Any:
        """Begin the run and return the library's object."""
        raise NotImplementedError

    def _store(self, values: dict[str, Any]) -> None:
        self._call(self.stores, values)

    def _log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        """Log each value by itself, so that the others aren't lost if the library refuses one."""
        for name, value in values.items():
            attempt(self, f"log({{{name!r}: ...}})", self._log_value, name, value, step, **kwargs)

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        raise NotImplementedError

    def _log_images(self, values: Images, step: int | None, **kwargs: Any) -> None:
        for name, images in values.items():
            for number, image in enumerate(images):
                self._log_image(name, number, image, step, **kwargs)

    def _log_image(self, name: str, number: int, image: Any, step: int | None, **kwargs: Any) -> None:
        raise NotImplementedError("it has no images")

    def _log_table(self, table: Table, **kwargs: Any) -> None:
        raise NotImplementedError("it has no tables")

    def _call(self, path: str, *args: Any) -> None:
        operator.attrgetter(path)(self)(*args)


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


class JSONLinesTracker(FolderTracker):
    """A file ``metrics.jsonl`` with one line of JSON for each ``log``. The run's own object is the file's path."""

    name, module, ends = "jsonl", "json", ""

    def _begin(self) -> Any:
        folder = self.logging_dir / self.run_name
        folder.mkdir(parents=True, exist_ok=True)
        return folder / "metrics.jsonl"

    def _store(self, values: dict[str, Any]) -> None:
        text = json_text(values, indent=2, default=plain)
        self.run.with_name("hparams.json").write_text(text + "\n", encoding="utf-8")

    def _log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        """Write a line. Values named ``time_s`` or, beside a step, ``step`` become ``time_s_`` and ``step_``."""
        line: dict[str, Any] = {"time_s": time.time(), "step": step}
        for name, value in {**values, **kwargs}.items():
            line[name if line.get(name) is None else f"{name}_"] = value
        with open(self.run, "a", encoding="utf-8") as file:
            file.write(json_text(line, default=plain) + "\n")

    def _log_table(self, table: Table, **kwargs: Any) -> None:
        columns, data = table.columns, table.rows
        if table.dataframe is not None:
            columns, data = list(table.dataframe.columns), table.dataframe.to_numpy().tolist()
        self._log({table.name: {"columns": columns, "data": data}}, table.step, **kwargs)


def plain(value: Any) -> Any:
    """Return a tensor or array as numbers, and other objects as text."""
    if not hasattr(value, "tolist"):
        return value if isinstance(value, (int, float, bool)) else str(value)
    numbers = value.tolist()
    while isinstance(numbers, list) and len(numbers) == 1:
        numbers = numbers[0]
    return numbers


class AimTracker(FolderTracker):
    """Aim; ``options`` are those of ``aim.Run``. The folder is the repository.

    Of images, a value can also be one image, or a pair of an image and its caption.
    """

    name = module = "aim"

    def _begin(self) -> Any:
        run = self.library.Run(repo=str(self.logging_dir), **self.options)
        run.name = self.run_name
        return run

    def _store(self, values: dict[str, Any]) -> None:
        self.run["hparams"] = values

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        self.run.track(self.library.Text(value) if isinstance(value, str) else plain(value), name, step, **kwargs)

    def _log_images(self, values: Images, step: int | None, **kwargs: Any) -> None:
        super()._log_images({name: i if isinstance(i, list) else [i] for name, i in values.items()}, step, **kwargs)

    def _log_image(self, name: str, number: int, image: Any, step: int | None, **kwargs: Any) -> None:  # noqa: ARG002
        image, caption = image if isinstance(image, tuple) else (image, "")
        self.run.track(self.library.Image(image, caption=caption), name, step, **kwargs)


class TensorBoardTracker(FolderTracker):
    """TensorBoard; ``options`` are those of ``torch.utils.tensorboard.SummaryWriter``.

    Images are batches of shape ``(n, channels, height, width)``, or with ``dataformats="NHWC"``.
    """

    name = module = "tensorboard"

    def _begin(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # can't be imported without the package tensorboard

        return SummaryWriter(self.logging_dir / self.run_name, **self.options)

    @property
    def writer(self) -> Any:
        """The ``SummaryWriter``."""
        return self.run

    def _store(self, values: dict[str, Any]) -> None:
        shown = {name: value if isinstance(value, (int, float, bool)) else str(value) for name, value in values.items()}
        self.run.add_hparams(shown, metric_dict={}, run_name=".")
        self.run.flush()

    def _log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        super()._log(values, step, **kwargs)
        self.run.flush()

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        if isinstance(value, str):
            self.run.add_text(name, value, global_step=step, **kwargs)
        elif isinstance(value, Mapping):
            self.run.add_scalars(name, value, global_step=step, **kwargs)
        else:
            self.run.add_scalar(name, plain(value), global_step=step, **kwargs)

    def _log_images(self, values: Images, step: int | None, **kwargs: Any) -> None:
        for name, images in values.items():
            self.run.add_images(name, images, global_step=step, **kwargs)


class WandBTracker(LibraryTracker):
    """Weights & Biases; ``options`` are those of ``wandb.init``."""

    name = module = "wandb"
    ends = "run.finish"

    def _begin(self) -> Any:
        return self.library.init(project=self.run_name, **self.options)

    def _store(self, values: dict[str, Any]) -> None:
        self.run.config.update(values, allow_val_change=True)

    def _log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self.run.log(values, step=step, **kwargs)

    def _log_images(self, values: Images, step: int | None, **kwargs: Any) -> None:
        made = {name: [self.library.Image(image) for image in images] for name, images in values.items()}
        self.run.log(made, step=step, **kwargs)

    def _log_table(self, table: Table, **kwargs: Any) -> None:
        given = {"columns": table.columns, "data": table.rows, "dataframe": table.dataframe}
        made = self.library.Table(**{name: value for name, value in given.items() if value is not None})
        self.run.log({table.name: made}, step=table.step, **kwargs)


class TrackioTracker(WandBTracker):
    """Trackio; ``options`` are those of ``trackio.init``."""

    name = module = "trackio"
    stores, _store = "run.config.update", LibraryTracker._store

    def _log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        self.run.log({name: plain(value) for name, value in values.items()}, step=step, **kwargs)

    def _log_images(self, values: Images, step: int | None, **kwargs: Any) -> None:
        """Write images under names of their own, since Trackio takes no lists: ``digit``, ``digit/1`` and so on."""
        for name, images in values.items():
            named = {f"{name}/{number}" if number else name: image for number, image in enumerate(images)}
            self.run.log({key: self.library.Image(image) for key, image in named.items()}, step=step, **kwargs)


class SwanLabTracker(TrackioTracker):
    """SwanLab; ``options`` are those of ``swanlab.init``."""

    name = module = "swanlab"
    _log_images = WandBTracker._log_images
    _log_table = LibraryTracker._log_table


class CometMLTracker(LibraryTracker):
    """Comet; ``options`` are those of ``comet_ml.start``, such as ``online=False``."""

    name = module = "comet_ml"
    stores, ends = "run.log_parameters", "run.end"

    def _begin(self) -> Any:
        return self.library.start(project_name=self.run_name, **self.options)

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        if isinstance(value, Mapping):
            self.run.log_metrics(value, step=step, **kwargs)
        elif isinstance(value, str):
            self.run.log_other(name, value, **kwargs)
        else:
            self.run.log_metric(name, plain(value), step=step, **kwargs)

    def _log_image(self, name: str, number: int, image: Any, step: int | None, **kwargs: Any) -> None:  # noqa: ARG002
        self.run.log_image(image, name=name, step=step, **kwargs)

    def _log_table(self, table: Table, **kwargs: Any) -> None:
        rows, headers = (table.rows, table.columns or False) if table.dataframe is None else (table.dataframe, True)
        self.run.log_table(f"{table.name}.csv", tabular_data=rows, headers=headers, **kwargs)


class MLflowTracker(LibraryTracker):
    """MLflow. The run is in the experiment ``MLFLOW_EXPERIMENT_NAME``, or else in one with the project's name.

    Args:
        experiment_name: The experiment, which is created if there is none of that name.
        logging_dir: The folder of a new experiment's artifacts, by default the server's or the store's.
        nested_run: Nest the run in the active one.
        options: Arguments of ``mlflow.start_run``, such as ``run_name``.
    """

    name = module = "mlflow"
    ends = "library.end_run"
    _PARAMETERS = 100  # the most that a store takes at once
    _CHARACTERS = 6000  # the longest parameter

    def __init__(
        self,
        experiment_name: str = "",
        logging_dir: str | os.PathLike[str] | None = None,
        nested_run: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(experiment_name, nested=nested_run, **options)
        self._artifacts = None if logging_dir is None else str(logging_dir)

    def _begin(self) -> Any:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or self.run_name
        experiment = self.library.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self.library.create_experiment(name, self._artifacts)
        return self.library.start_run(experiment_id=number, **self.options)

    @property
    def _run_id(self) -> Any:
        return self.run.info.run_id

    def _store(self, values: dict[str, Any]) -> None:
        texts = [(name, str(value)[: self._CHARACTERS]) for name, value in values.items()]
        for start in range(0, len(texts), self._PARAMETERS):
            self.library.log_params(dict(texts[start : start + self._PARAMETERS]), run_id=self._run_id)

    def _log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        """Write numbers as metrics, and anything else as tags of the run, since metrics are numbers only."""
        metrics = {name: plain(value) for name, value in values.items()}
        tags = {name: str(metrics.pop(name)) for name in list(metrics) if not isinstance(metrics[name], (int, float))}
        self.library.log_metrics(metrics, step=step, run_id=self._run_id, **kwargs)
        if tags:
            self.library.set_tags(tags)

    def _log_image(self, name: str, number: int, image: Any, step: int | None, **kwargs: Any) -> None:  # noqa: ARG002
        self.library.log_image(image, key=name, step=step, **kwargs)

    def _log_table(self, table: Table, **kwargs: Any) -> None:
        by_column = dict(zip(table.columns or (), map(list, zip(*(table.rows or ()), strict=True)), strict=False))
        made = by_column if table.dataframe is None else table.dataframe
        self.library.log_table(made, f"{table.name}.json", run_id=self._run_id, **kwargs)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Call ``mlflow.log_figure``."""
        self._write("log_figure", self.library.log_figure, figure, artifact_file, **save_kwargs)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Call ``mlflow.log_artifact``."""
        self._write("log_artifact", self.library.log_artifact, local_path, artifact_path, run_id=self._run_id)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Call ``mlflow.log_artifacts``."""
        self._write("log_artifacts", self.library.log_artifacts, local_dir, artifact_path, run_id=self._run_id)


class ClearMLTracker(LibraryTracker):
    """ClearML; ``options`` are those of ``clearml.Task.init``. A task that is active already is used and left open."""

    name = module = "clearml"
    stores = "run.connect_configuration"

    def _begin(self) -> Any:
        task = self.library.Task.current_task()
        self.ends = "" if task else "run.close"
        return task or self.library.Task.init(**{"project_name": self.run_name, **self.options})

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:
        logger = self.run.get_logger()
        if isinstance(value, str):
            logger.report_text(f"{name}: {value}", **kwargs)
        elif step is None:
            logger.report_single_value(name, plain(value), **kwargs)
        else:
            logger.report_scalar(**_titled(name), value=plain(value), iteration=step, **kwargs)

    def _log_image(self, name: str, number: int, image: Any, step: int | None, **kwargs: Any) -> None:  # noqa: ARG002
        self.run.get_logger().report_image(**_titled(name), iteration=step, image=image, **kwargs)

    def _log_table(self, table: Table, **kwargs: Any) -> None:
        rows = [*([table.columns] if table.columns else []), *(table.rows or [])]
        made = rows if table.dataframe is None else table.dataframe
        self.run.get_logger().report_table(**_titled(table.name), iteration=table.step, table_plot=made, **kwargs)


def _titled(name: str) -> dict[str, str]:
    """Return ClearML's title and series: ``eval_loss`` belongs to the graph ``loss`` as its series ``eval``."""
    series, _, title = name.partition("_")
    if series in ("train", "eval", "test") and title:
        return {"title": title, "series": series}
    return {"title": name, "series": "train"}


class DVCLiveTracker(LibraryTracker):
    """DVCLive; ``options`` are those of ``dvclive.Live``, or ``live``, an existing ``Live`` object."""

    name = module = "dvclive"
    stores, ends = "run.log_params", "run.end"

    def _begin(self) -> Any:
        return self.options.get("live") or self.library.Live(**self.options)

    def _log(self, values: dict[str, Any], step: int | None, **kwargs: Any) -> None:
        """Write the values, and start the next step."""
        if step is not None:
            self.run.step = step
        super()._log(values, step, **kwargs)
        self.run.next_step()

    def _log_value(self, name: str, value: Any, step: int | None, **kwargs: Any) -> None:  # noqa: ARG002
        self.run.log_metric(name, plain(value), **kwargs)

    def _log_image(self, name: str, number: int, image: Any, step: int | None, **kwargs: Any) -> None:
        if step is not None:
            self.run.step = step
        self.run.log_image(f"{name}/{number}.png", image, **kwargs)


LIBRARIES = [kind for kind in list(vars().values()) if getattr(kind, "module", "") and issubclass(kind, LibraryTracker)]
"""The classes above that write through a library."""
