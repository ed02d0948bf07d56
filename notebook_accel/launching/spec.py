"""What a rank must know about its run before it opens the payload, whose head this is."""

from __future__ import annotations

import msgspec

__all__ = ["JobSpec", "Source"]


class Source(msgspec.Struct, frozen=True):
    """Source text that is in no file: a cell's. ``label`` is what a traceback calls it, such as ``In[7]``."""

    label: str
    text: str


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank must know before it opens the payload, whose head this is.

    Attributes:
        name: The run's name.
        world_size: Number of ranks.
        environment: The kernel's environment variables at the launch, with the run's own.
        working_directory: The kernel's at the launch; empty for ranks on other machines, which have their own.
        sys_path: The kernel's at the launch.
        sources: Sources of the notebook's functions, by the file name in their code.
        cell: The cell's source, for a target that is a cell; ``None`` for a function.
        cell_filename: The file name that the cell's code gets; a key of ``sources``.
        calls: Name of the function that the cell ends by defining and that is called, empty if there is none.
        pull: Names whose values rank 0 sends back beside its result.
        left_out: Names that the cell may read and that couldn't be sent, with the reason.
    """

    name: str
    world_size: int
    environment: dict[str, str]
    working_directory: str
    sys_path: list[str]
    sources: dict[str, Source] = {}
    cell: str | None = None
    cell_filename: str = ""
    calls: str = ""
    pull: tuple[str, ...] = ()
    left_out: dict[str, str] = {}

    def encode(self) -> bytes:
        """As bytes, for the head of the payload."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> JobSpec:
        """From the bytes of ``encode``."""
        return _decoder.decode(data)


_decoder = msgspec.msgpack.Decoder(JobSpec)  # made once, in the template, instead of in each rank
