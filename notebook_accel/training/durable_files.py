"""Files that are there whole or not at all, however the process that writes them ends."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator

__all__ = ["sync", "written"]


@contextlib.contextmanager
def written(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A name to write a file under, which is the file's own if the body ends well."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
        sync(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def sync(path: pathlib.Path) -> None:
    """Returns when a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
