"""Checkpoint folders and files that appear only when they are complete, however the process that writes them ends.

A checkpoint is written under a temporary name, with its manifest last, and then renamed. Two renames put it in place of
an older checkpoint of its name; ``recover`` restores the older one if the process was killed between them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

from notebook_accel import code_places
from notebook_accel.errors import CheckpointError, ConfigError

MANIFEST = "checkpoint.json"
_FORMAT = 1
_UNREADABLE = (OSError, ValueError, KeyError, TypeError)  # raised for a folder that has no valid manifest
_NUMBERED = re.compile(r"checkpoint_(\d+)")


@dataclasses.dataclass
class ProjectConfiguration:
    """Folders of a run.

    Attributes:
        project_dir: The run's folder.
        logging_dir: The folder that trackers write to; by default ``project_dir``.
        automatic_checkpoint_naming: Number the checkpoints: ``project_dir/checkpoints/checkpoint_0`` and so on.
        total_limit: With automatic naming, keep this number of checkpoints, the newest ones. By default all.
        iteration: With automatic naming, the number of the next checkpoint. ``load_state`` sets it to the number after
            the loaded checkpoint's.
        save_on_each_node: Only ``False``, since all machines share one file system.

    Raises:
        ConfigError: An option has an invalid value.
    """

    project_dir: str | os.PathLike[str] | None = None
    logging_dir: str | os.PathLike[str] | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ConfigError(f"total_limit is {self.total_limit}.", fix="a whole number from 1, or None to keep all")
        if self.save_on_each_node:
            raise ConfigError("save_on_each_node=True isn't supported.", fix="a project_dir that all machines see")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the run's folder, and the trackers' folder if it isn't set."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = self.project_dir

    def checkpoints(self) -> pathlib.Path:
        """Return the folder of the numbered checkpoints.

        Raises:
            ConfigError: There is no ``project_dir``.
        """
        if self.project_dir is None:
            raise ConfigError(
                "automatic_checkpoint_naming needs a folder, and there is no project_dir.",
                fix='Accelerator(project_dir="runs/first", ...)',
            )
        return pathlib.Path(self.project_dir).resolve() / "checkpoints"

    def count_on(self, folder: pathlib.Path) -> None:
        """Number the next checkpoint after ``folder``, which rank 0 has chosen: it may have saved some alone."""
        number = number_of(folder)
        if self.automatic_checkpoint_naming and number is not None:
            self.iteration = number + 1


def next_in(configuration: ProjectConfiguration) -> pathlib.Path:
    """Return the folder of the next numbered checkpoint.

    Raises:
        ConfigError: There is no ``project_dir``, or the checkpoint exists already.
    """
    folder = configuration.checkpoints() / f"checkpoint_{configuration.iteration}"
    if _is_complete(folder):
        raise ConfigError(
            f"There is a checkpoint {folder} already.",
            why="An earlier run has written it, and this run would replace it.",
            fix="accelerator.load_state() to go on from the last checkpoint, another project_dir, or move it away",
        )
    return folder


def warn_if_taken(configuration: ProjectConfiguration) -> None:
    """Warn, when training begins, if there is a checkpoint already where the next numbered one would be."""
    if configuration.automatic_checkpoint_naming and configuration.project_dir is not None:
        try:
            next_in(configuration)
        except ConfigError as error:
            code_places.warn(f"The next save_state will fail. {error.what} Fix: {error.fix}")


def latest(configuration: ProjectConfiguration) -> pathlib.Path:
    """Return the numbered checkpoint with the highest number.

    Raises:
        CheckpointError: There is no checkpoint.
        ConfigError: There is no ``project_dir``.
    """
    folder = configuration.checkpoints()
    complete = _numbered(folder)
    if not complete:
        raise CheckpointError(
            f"There is no checkpoint in {folder}.", fix="accelerator.save_state() first, or another project_dir"
        )
    return complete[-1]


def delete_oldest(folder: pathlib.Path, limit: int | None) -> None:
    """Delete the numbered checkpoints in ``folder`` but the newest ``limit``, and the drafts of killed processes."""
    for old in [] if limit is None else _numbered(folder)[:-limit]:
        old.rename(_sibling(old, "removed"))  # first, so that a half-deleted one is never taken for complete
    for path in [*folder.glob(".checkpoint_*.removed"), *folder.glob(".checkpoint_*.saving")]:
        _delete(path)


def number_of(folder: pathlib.Path) -> int | None:
    """Return a numbered checkpoint's number, ``None`` for any other folder."""
    match = _NUMBERED.fullmatch(folder.name)
    return None if match is None else int(match[1])


def draft_of(folder: pathlib.Path) -> pathlib.Path:
    """Return the temporary name of a checkpoint that is being written."""
    return _sibling(folder, "saving")


def start_draft(folder: pathlib.Path) -> pathlib.Path:
    """Create an empty draft to write to, in place of a killed process's draft; return ``folder``."""
    recover(folder)
    abandon(folder)
    draft_of(folder).mkdir(parents=True)
    return folder


def abandon(folder: pathlib.Path) -> None:
    """Delete the draft of a checkpoint that can't be finished."""
    _delete(draft_of(folder))


def publish(folder: pathlib.Path, manifest: dict[str, Any]) -> None:
    """Complete the draft with its manifest and rename it to ``folder``.

    If a folder of that name exists, its files that aren't part of a checkpoint move to the new folder.
    """
    draft, previous = draft_of(folder), _sibling(folder, "previous")
    files = {
        os.path.relpath(os.path.join(inner, name), draft): os.path.getsize(os.path.join(inner, name))
        for inner, _, names in os.walk(draft)
        for name in names
    }
    text = json.dumps({"format": _FORMAT, **manifest, "files": files}, indent=2) + "\n"
    (draft / MANIFEST).write_text(text, encoding="utf-8")
    _fsync(draft / MANIFEST)
    for inner, _, _ in os.walk(draft):
        _fsync(pathlib.Path(inner))
    if folder.exists():
        folder.rename(previous)
    draft.rename(folder)
    _fsync(folder.parent)
    recover(folder)


def recover(folder: pathlib.Path) -> pathlib.Path:
    """Finish or undo the renames of a killed process, so that there is one ``folder`` or none; return its path."""
    previous = _sibling(folder, "previous")
    if previous.exists() and not folder.exists():
        previous.rename(folder)
    elif previous.exists():
        try:
            own = {MANIFEST, *(name.split(os.sep)[0] for name in _parsed_manifest(previous)["files"])}
        except _UNREADABLE:
            own = set()
        for entry in list(previous.iterdir()):
            if entry.name not in own and not (folder / entry.name).exists():
                entry.rename(folder / entry.name)
        _delete(previous)
    return folder


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """Return a checkpoint's manifest, after checking that all its files are there and have their sizes.

    Raises:
        CheckpointError: There is no such folder, it isn't a checkpoint, or a file is missing or has another size.
    """
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint {folder}.", fix=_others_near(folder))
    try:
        manifest = _parsed_manifest(folder)
        files: dict[str, int] = manifest["files"]
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{folder} isn't a checkpoint of accelerator.save_state: its {MANIFEST} can't be read ({error}).",
            fix=_others_near(folder),
        ) from error
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{folder} was written by another version.", fix="load it with that version")
    for name, size_bytes in files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size_bytes:
            state = "is missing" if found is None else f"has {found} bytes instead of {size_bytes}"
            raise CheckpointError(
                f"The checkpoint {folder} isn't whole: {name} {state}.",
                why="It was changed or copied incompletely after it was saved.",
                fix=_others_near(folder),
            )
    return manifest


def is_of_accelerate(folder: pathlib.Path) -> bool:
    """Return whether a folder has a checkpoint of Accelerate, which writes its random states late."""
    return not (folder / MANIFEST).is_file() and (folder / "random_states_0.pkl").is_file()


def _parsed_manifest(folder: pathlib.Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    return manifest


def _others_near(folder: pathlib.Path) -> str:
    parent = folder.parent
    others = sorted(path.name for path in parent.iterdir() if _is_complete(path)) if parent.is_dir() else []
    shown = ", ".join(name for name in others if name != folder.name)
    return f"use another one of {parent}: {shown}" if shown else "use the folder that accelerator.save_state returned"


def _is_complete(folder: pathlib.Path) -> bool:
    # The manifest is written before the folder gets its name.
    return not folder.name.startswith(".") and ((folder / MANIFEST).is_file() or is_of_accelerate(folder))


def _numbered(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the complete numbered checkpoints, the oldest first."""
    if not folder.is_dir():
        return []
    found = {number_of(path): path for path in folder.iterdir() if _is_complete(path)}
    return [path for number, path in sorted((number, path) for number, path in found.items() if number is not None)]


def _sibling(folder: pathlib.Path, what: str) -> pathlib.Path:
    return folder.with_name(f".{folder.name}.{what}")


def _delete(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_write(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a temporary path to write to, and rename that file to ``path`` if the body succeeds."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
        _fsync(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _fsync(path: pathlib.Path) -> None:
    """Block until a file's content, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
