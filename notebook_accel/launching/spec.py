"""The head of a payload: the description of the run, which the kernel writes and each rank reads."""

from __future__ import annotations
import __future__

import ast
import functools
import secrets
import types
from typing import Any

import msgspec

from notebook_accel.launching.loggers import LoggerSettings

_DEFINING = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass)


class Source(msgspec.Struct, frozen=True):
    """The source of a cell, which has no file. ``label`` is the cell's name in tracebacks, such as ``In[7]``."""

    label: str
    text: str


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A run's description, which a rank reads before it opens the rest of the payload.

    The launcher fills in size, environment and folders, once the ranks' devices are known.

    Attributes:
        name: The run's name.
        world_size: Number of ranks.
        environment: The kernel's environment variables at the launch, with the run's own.
        working_directory: The kernel's directory at the launch; empty for ranks on other machines.
        sys_path: The kernel's import path at the launch.
        loggers: The kernel's loggers at the launch, by name.
        torch_settings: The kernel's settings of torch at the launch that aren't its defaults, by name.
        warning_filters: The kernel's filters of warnings at the launch.
        sources: Sources of the notebook's functions, by the file name in their code.
        cell: The cell's source; ``None`` if the target is a function.
        cell_filename: The file name of the cell's code; a key of ``sources``.
        calls: Name of the function to call, which the cell defines at its end; empty if there is none.
        pull: Names of the variables that rank 0 sends back with its result.
        unsent: Variables that the cell may read but that couldn't be sent, with the reasons.
        is_detached: True if the run goes on without the kernel, so that its processes need titles that identify them.
        nonce: A random number that differs between runs.
        authkey: The key to the kernel's ``multiprocessing.Manager``; empty if the spec may be stored or sent elsewhere.
    """

    name: str
    world_size: int = 0
    environment: dict[str, str] = {}
    working_directory: str = ""
    sys_path: list[str] = []
    loggers: dict[str, LoggerSettings] = {}
    torch_settings: dict[str, Any] = {}
    warning_filters: list[tuple[str, str, tuple[str, str], str, int]] = []
    sources: dict[str, Source] = {}
    cell: str | None = None
    cell_filename: str = ""
    calls: str = ""
    pull: tuple[str, ...] = ()
    unsent: dict[str, str] = {}
    is_detached: bool = False
    nonce: int = msgspec.field(default_factory=functools.partial(secrets.randbits, 32))
    authkey: bytes = b""

    def encode(self) -> bytes:
        """Return the bytes for the head of the payload."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> JobSpec:
        """Decode the bytes of ``encode``."""
        return _decoder.decode(data)


_decoder = msgspec.msgpack.Decoder(JobSpec)  # the template makes it once for all ranks


def definitions(source: str, label: str) -> list[types.CodeType]:
    """Return the code of a cell's imports, top-level definitions and literal constants, statement by statement."""
    kept = [node for node in ast.parse(source, label).body if _defines(node)]
    flags = 0
    for node in kept:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            flags |= sum(getattr(__future__, feature.name).compiler_flag for feature in node.names)
    return [compile(ast.Module([node], []), label, "exec", flags=flags, dont_inherit=True) for node in kept]


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, (ast.If, ast.Try)):
        handled = [statement for handler in getattr(node, "handlers", ()) for statement in handler.body]
        return all(map(_defines, [*node.body, *node.orelse, *getattr(node, "finalbody", ()), *handled]))
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        try:
            ast.literal_eval(node.value)
        except ValueError:
            return False
        return True
    return isinstance(node, _DEFINING)
