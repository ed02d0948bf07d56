"""What a run leaves on the disk: checkpoints, weights, and what trackers write."""

from __future__ import annotations

import collections
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.training import checkpoint, checkpoint_folders, model_files, tracking
from notebook_accel.training.backends.backend import Backend
from notebook_accel.training.checkpoint_folders import ProjectConfiguration
from notebook_accel.training.process_control import ProcessControl

__all__ = ["Project"]

_Path = str | os.PathLike[str]


class Project(ProcessControl):
    """A rank with the files of its run.

    Args:
        backend: The way to the other ranks.
        project_dir: The run's folder, unless ``configuration`` has one.
        configuration: More about it.
        log_with: The trackers that ``init_trackers`` starts.

    Attributes:
        project_configuration: Where the files are.
        trackers: What ``log`` writes to; on rank 0, after ``init_trackers``.

    Raises:
        ConfigError: A tracker that isn't there, or one that needs a folder, and there is none.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        project_dir: _Path | None = None,
        configuration: ProjectConfiguration | None = None,
        log_with: Any = None,
    ) -> None:
        super().__init__(backend)
        self.project_configuration = configuration or ProjectConfiguration(project_dir=project_dir)
        if project_dir is not None and self.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self.trackers: list[Any] = []
        self._log_with = tracking.resolve(log_with, self.logging_dir)
        self._registered: list[Any] = []
        # Ordered dictionaries, since a handle refers to them weakly.
        self._before_save: collections.OrderedDict[int, Callable[..., None]] = collections.OrderedDict()
        self._before_load: collections.OrderedDict[int, Callable[..., None]] = collections.OrderedDict()

    @property
    def project_dir(self) -> _Path | None:
        """The run's folder."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> _Path | None:
        """Where trackers write."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint, with automatic naming."""
        return self.project_configuration.iteration

    # Checkpoints

    def save_state(self, output_dir: _Path | None = None, safe_serialization: bool = True) -> str:
        """Saves all that training depends on, so that ``load_state`` goes on as if nothing had happened.

        That is prepared models, optimizers and schedulers, the loss scaler, random numbers of each rank, where each
        loader stands, gradients of a window that has begun, and registered objects. All ranks call it. The folder
        appears when it is complete; if a process is killed before, the earlier checkpoint is still there.

        Args:
            output_dir: The folder. With automatic naming it is ``project_dir/checkpoints/checkpoint_<iteration>``.
            safe_serialization: Weights in safetensors rather than in torch's own format.

        Returns:
            The folder.

        Raises:
            CheckpointError: A rank couldn't write its part.
            ConfigError: There is no folder to save to, or the numbered one is taken.
        """
        configuration = self.project_configuration
        is_numbered = configuration.automatic_checkpoint_naming

        def choose() -> pathlib.Path:
            return checkpoint_folders.next_in(configuration) if is_numbered else _folder(output_dir)

        hooks = checkpoint.Hooks([*self._before_save.values()], [])
        folder = checkpoint.save(self._backend, self._contents(), hooks, choose, safe=safe_serialization)
        if is_numbered:
            configuration.iteration += 1
            if self.is_main_process:
                checkpoint_folders.tidy(folder.parent, configuration.total_limit)
        return str(folder)

    def load_state(
        self,
        input_dir: _Path | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        strict: bool = True,
    ) -> str:
        """Puts training back to where ``save_state`` was called. All ranks call it, after ``prepare``.

        A loader goes on with the batch after the last one that was out, in the epoch that was running: its ``epoch``
        says which. Saved while the last batch was out, that epoch has no further ones, and what follows its loop runs.

        Args:
            input_dir: The folder; by default, with automatic naming, the numbered one with the highest number.
            load_kwargs: ``{"weights_only": False}`` also reads registered objects that can run code when they are read.
            strict: The models have to have exactly the tensors that were saved.

        Returns:
            The folder.

        Raises:
            CheckpointError: There is no such checkpoint, it isn't whole, or it is of another world size or model.
        """
        configuration = self.project_configuration
        is_numbered = input_dir is None and configuration.automatic_checkpoint_naming

        def choose() -> pathlib.Path:
            return checkpoint_folders.latest(configuration) if is_numbered else _folder(input_dir)

        hooks = checkpoint.Hooks([], [*self._before_load.values()])
        weights_only = bool((load_kwargs or {}).get("weights_only", True))
        options = {"strict": strict, "weights_only": weights_only}
        folder = checkpoint.load(self._backend, self._contents(), hooks, choose, **options)
        number = checkpoint_folders.number_of(folder)
        if configuration.automatic_checkpoint_naming and number is not None:
            configuration.iteration = number + 1
        return str(folder)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Makes objects part of each checkpoint.

        Raises:
            TrainingError: One has no ``state_dict`` or no ``load_state_dict``.
        """
        for item in objects:
            if not all(callable(getattr(item, name, None)) for name in ("state_dict", "load_state_dict")):
                raise TrainingError(
                    f"{type(item).__name__} can't be part of a checkpoint.",
                    why="It needs the methods state_dict() and load_state_dict(state).",
                    fix="give its class both",
                )
        self._registered += [item for item in objects if not any(item is known for known in self._registered)]

    def register_save_state_pre_hook(
        self, hook: Callable[[list[torch.nn.Module], list[dict[str, Any]], str], None]
    ) -> RemovableHandle:
        """Calls ``hook(models, weights, folder)`` on every rank before models are saved.

        ``folder`` still has another name than it will have. Weights that the hook takes out of the list aren't saved.

        Returns:
            A handle; ``handle.remove()`` takes the hook away.
        """
        return _registered(self._before_save, hook)

    def register_load_state_pre_hook(self, hook: Callable[[list[torch.nn.Module], str], None]) -> RemovableHandle:
        """Calls ``hook(models, folder)`` on every rank before models are loaded; what it takes out isn't loaded.

        Returns:
            A handle; ``handle.remove()`` takes the hook away.
        """
        return _registered(self._before_load, hook)

    # Weights and other files

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state dict of a model as it was before ``prepare``; with ``unwrap=False`` as it is now."""
        state: dict[str, Any] = self._backend.to_host(checkpoint.state_of(model) if unwrap else model.state_dict())
        return state

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: _Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes a model's weights to ``model.safetensors``, in shards with an index if they are large. Rank 0 writes.

        Args:
            model: A model, prepared or not.
            save_directory: The folder.
            max_shard_size: Bytes, or text such as ``"5GB"``.
            safe_serialization: Safetensors rather than torch's own format.

        Raises:
            CheckpointError: There is something in its state that safetensors can't hold.
            ConfigError: ``max_shard_size`` isn't a size, or there is a file where the folder should be.
        """
        if self.is_main_process:
            state = self.get_state_dict(model)
            model_files.save_model(state, _folder(save_directory), max_shard_size, safe_serialization)

    def save(self, obj: Any, f: _Path, safe_serialization: bool = False) -> None:
        """``torch.save`` on rank 0, or safetensors; the file is there whole or not at all."""
        if self.is_main_process:
            model_files.save(obj, f, safe=safe_serialization)

    # Trackers

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Starts the trackers of ``log_with``, on rank 0.

        Args:
            project_name: What the run is called there.
            config: What the run was told, such as its hyperparameters.
            init_kwargs: More arguments by the tracker's name, such as ``{"tensorboard": {"flush_secs": 60}}``.
        """
        if self.is_main_process:
            self.trackers = tracking.start(self._log_with, project_name, self.logging_dir, init_kwargs or {})
            for tracker in self.trackers if config is not None else ():
                tracker.store_init_configuration(dict(config or {}))

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Writes values to every tracker, on rank 0."""
        for tracker in self.trackers:
            tracker.log(dict(values), step=step, **(log_kwargs or {}).get(tracker.name, {}))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """A tracker by its name; with ``unwrap`` the library's own object. On other ranks one that does nothing.

        Raises:
            ConfigError: There is none of that name.
        """
        return tracking.find(self.trackers, name, unwrap=unwrap) if self.is_main_process else tracking.GeneralTracker()

    def _finish_trackers(self) -> None:
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []

    def _contents(self) -> checkpoint.Contents:
        """What a checkpoint is of; whoever has prepared it says."""
        raise NotImplementedError


def _folder(path: _Path | None) -> pathlib.Path:
    if path is None:
        raise ConfigError(
            "There is no folder for the checkpoint.",
            fix='give it one, or Accelerator(project_config=ProjectConfiguration(project_dir="runs/first", '
            "automatic_checkpoint_naming=True))",
        )
    return pathlib.Path(path).expanduser().resolve()


def _registered(hooks: collections.OrderedDict[int, Any], hook: Any) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
