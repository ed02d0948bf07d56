"""Folders of checkpoints: complete ones only, however the process that writes them ends.

A checkpoint is written under another name, with a manifest that comes last, and renamed. It takes the place of an older
one of its name in two renames; ``settle`` puts the older one back if the process was killed between them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shutil
from typing import Any

from notebook_accel.errors import CheckpointError, ConfigError
from notebook_accel.training.durable_files import sync, written

__all__ = [
    "MANIFEST",
    "ProjectConfiguration",
    "abandon",
    "draft_of",
    "latest",
    "next_in",
    "number_of",
    "publish",
    "read_manifest",
    "settle",
    "start_draft",
    "tidy",
]

MANIFEST = "checkpoint.json"
_FORMAT = 1
_NUMBERED = re.compile(r"checkpoint_(\d+)")


@dataclasses.dataclass
class ProjectConfiguration:
    """Where a run keeps its files.

    Attributes:
        project_dir: The run's folder.
        logging_dir: Where trackers write; by default ``project_dir``.
        automatic_checkpoint_naming: Number the checkpoints: ``project_dir/checkpoints/checkpoint_0`` and so on.
        total_limit: With automatic naming: how many checkpoints are kept, the newest ones. By default all.
        iteration: With automatic naming: the number of the next checkpoint. After ``load_state`` it is the one after
            the checkpoint that was loaded.
        save_on_each_node: Only ``False``: there is one machine, or one file system that all see.

    Raises:
        ConfigError: One of them can't be.
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
            raise ConfigError("save_on_each_node=True isn't there yet.", fix="a project_dir that all machines see")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Sets the run's folder, and that of the trackers if it has none."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = self.project_dir

    def checkpoints(self) -> pathlib.Path:
        """The folder of the numbered checkpoints.

        Raises:
            ConfigError: There is no ``project_dir``.
        """
        if self.project_dir is None:
            raise ConfigError(
                "automatic_checkpoint_naming needs a folder, and there is no project_dir.",
                fix='Accelerator(project_dir="runs/first", ...)',
            )
        return pathlib.Path(self.project_dir).resolve() / "checkpoints"


def next_in(configuration: ProjectConfiguration) -> pathlib.Path:
    """The folder of the next numbered checkpoint.

    Raises:
        ConfigError: There is no ``project_dir``, or there is such a checkpoint already.
    """
    folder = configuration.checkpoints() / f"checkpoint_{configuration.iteration}"
    if _is_complete(folder):
        raise ConfigError(
            f"There is a checkpoint {folder} already.",
            why="An earlier run has written it, and this one would replace it.",
            fix="accelerator.load_state() to go on from the last one, or another project_dir",
        )
    return folder


def latest(configuration: ProjectConfiguration) -> pathlib.Path:
    """The numbered checkpoint with the highest number.

    Raises:
        CheckpointError: There is none.
        ConfigError: There is no ``project_dir``.
    """
    folder = configuration.checkpoints()
    complete = _numbered(folder)
    if not complete:
        raise CheckpointError(
            f"There is no checkpoint in {folder}.", fix="accelerator.save_state() first, or the right project_dir"
        )
    return complete[-1]


def tidy(folder: pathlib.Path, limit: int | None) -> None:
    """Deletes numbered checkpoints in ``folder`` but the newest ``limit``, and what killed processes have left."""
    for old in [] if limit is None else _numbered(folder)[:-limit]:
        # It loses its name before the first file goes, so that half of a checkpoint is never taken for one.
        old.rename(_sibling(old, "removed"))
    for path in list(folder.glob(".checkpoint_*.removed")) + list(folder.glob(".checkpoint_*.saving")):
        _delete(path)


def number_of(folder: pathlib.Path) -> int | None:
    """A numbered checkpoint's number."""
    match = _NUMBERED.fullmatch(folder.name)
    return None if match is None else int(match[1])


def draft_of(folder: pathlib.Path) -> pathlib.Path:
    """What a folder is called as long as it is being written."""
    return _sibling(folder, "saving")


def start_draft(folder: pathlib.Path) -> pathlib.Path:
    """An empty folder to write into, in place of what a killed process may have left."""
    settle(folder)
    draft = draft_of(folder)
    _delete(draft)
    draft.mkdir(parents=True)
    return draft


def abandon(folder: pathlib.Path) -> None:
    """Deletes what was written of a checkpoint that can't be finished."""
    _delete(draft_of(folder))


def publish(folder: pathlib.Path, manifest: dict[str, Any]) -> None:
    """Completes the draft with its manifest and gives it the folder's name.

    If there is a folder of that name, what isn't part of a checkpoint in there moves into the new one.
    """
    draft, previous = draft_of(folder), _sibling(folder, "previous")
    files = {
        os.path.relpath(os.path.join(inner, name), draft): os.path.getsize(os.path.join(inner, name))
        for inner, _, names in os.walk(draft)
        for name in names
    }
    with written(draft / MANIFEST) as file:
        file.write_text(json.dumps({"format": _FORMAT, **manifest, "files": files}, indent=2) + "\n", encoding="utf-8")
    for inner, _, _ in os.walk(draft):
        sync(pathlib.Path(inner))
    if folder.exists():
        folder.rename(previous)
    draft.rename(folder)
    sync(folder.parent)
    settle(folder)


def settle(folder: pathlib.Path) -> None:
    """Ends what a killed process has begun: afterwards there is one folder of that name, or none."""
    previous = _sibling(folder, "previous")
    if previous.exists() and not folder.exists():
        previous.rename(folder)
    elif previous.exists():
        own = {name.split(os.sep)[0] for name in _listed(previous)}
        for entry in list(previous.iterdir()):
            if entry.name not in own and not (folder / entry.name).exists():
                entry.rename(folder / entry.name)
        _delete(previous)


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """What a checkpoint is of, after a look whether all its files are there and whole.

    Raises:
        CheckpointError: There is no such folder, it isn't a checkpoint, or a file is missing or has another size.
    """
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint {folder}.", fix=_others_near(folder))
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, int] = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} isn't a checkpoint of accelerator.save_state: its {MANIFEST} can't be read ({error}).",
            fix=_others_near(folder),
        ) from error
    if manifest.get("format") != _FORMAT:
        raise CheckpointError(f"{folder} was written by another version.", fix="load it with that version")
    for name, size_bytes in files.items():
        found = _size_bytes(folder / name)
        if found != size_bytes:
            state = "is missing" if found is None else f"has {found} bytes instead of {size_bytes}"
            raise CheckpointError(
                f"The checkpoint {folder} isn't whole: {name} {state}.",
                why="It was changed or copied incompletely after it was saved.",
                fix=_others_near(folder),
            )
    return manifest


def _size_bytes(path: pathlib.Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _others_near(folder: pathlib.Path) -> str:
    parent = folder.parent
    others = sorted(path.name for path in parent.iterdir() if _is_complete(path)) if parent.is_dir() else []
    shown = ", ".join(name for name in others if name != folder.name)
    return f"use another one of {parent}: {shown}" if shown else "look where accelerator.save_state has saved"


def _is_complete(folder: pathlib.Path) -> bool:
    # The manifest is written before the folder gets its name.
    return not folder.name.startswith(".") and (folder / MANIFEST).is_file()


def _numbered(folder: pathlib.Path) -> list[pathlib.Path]:
    """The complete numbered checkpoints, the oldest first."""
    if not folder.is_dir():
        return []
    found = {number_of(path): path for path in folder.iterdir() if _is_complete(path)}
    return [path for number, path in sorted((number, path) for number, path in found.items() if number is not None)]


def _listed(folder: pathlib.Path) -> list[str]:
    """The files that a checkpoint consists of; none if the folder isn't one."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [MANIFEST, *files]


def _sibling(folder: pathlib.Path, what: str) -> pathlib.Path:
    return folder.with_name(f".{folder.name}.{what}")


def _delete(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
