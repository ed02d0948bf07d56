"""``%%distributed --export train.py``: write a cell as a script that needs no notebook, without running any code."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import importlib
import inspect
import io
import os
import pathlib
import re
import shlex
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import cloudpickle

from notebook_accel import config
from notebook_accel.command_text import ShellCommands
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import CellError, ConfigError
from notebook_accel.exporting import contents
from notebook_accel.exporting.contents import ScriptContents
from notebook_accel.exporting.statements import Body, indented
from notebook_accel.formatting import format_size
from notebook_accel.launching.kernel.cell import Cell
from notebook_accel.launching.kernel.devices import Devices
from notebook_accel.payload import unpicklable

_MARKED = re.compile(r"# Exported from .+ by %%distributed --export \(checksum ([0-9a-f]{12})\)\.\n")
_NOT_FOR_SCRIPTS = frozenset({"name", "view", "allow_initialized_cuda", "start_method", "preload"})
_IMPORTS_OF_SHELL = (
    *("import re", "import string", "import subprocess", "import sys"),
    *("from collections.abc import Iterator, Mapping", "from typing import Any"),
)


@dataclasses.dataclass(frozen=True)
class ExportRequest:
    """The options of an export."""

    path: pathlib.Path  # the script to write
    options: LaunchConfig  # of the launch
    given: Mapping[str, Any]  # the options that were given as flags
    args: str | None = None  # the expression after ``--args``
    push: Sequence[str] = ()  # further names that the cell needs
    overwrite: bool = False  # whether existing files may be replaced even if an export hasn't written them

    @property
    def data_path(self) -> pathlib.Path:
        """Path of the file for values without source."""
        return self.path.with_name(f"{self.path.stem}_data.pt")


def export(cell: Cell, request: ExportRequest, namespace: Mapping[str, Any], history: Sequence[str]) -> str:
    """Write the script, and a file with its data if it needs one. Return a message about the written files.

    ``history`` has the notebook's earlier cells, in order, from number 0. All sources are plain Python: IPython has
    translated its own syntax.

    Raises:
        CellError: The cell can't be a script. The message has the reason and the line.
        ConfigError: The file can't be written.
        PayloadError: Data can't be pickled.
    """
    _check_path(request)
    body = Body(cell.source, cell.calls, request.args)
    found = contents.collect(cell, body, namespace, history, request.args, request.push)
    draft = request.data_path.with_name(f"{request.data_path.name}.{os.getpid()}.tmp")
    try:
        loading = _write_data(draft, found, request)
        text = _text(cell, request, found, body, loading)
        if found.data:
            os.replace(draft, request.data_path)
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, request.path)
    except OSError as error:
        raise ConfigError(
            f"{request.path} can't be written: {error.strerror}.", fix="--export with a path that you may write to"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    if not found.data:
        return f"Written: {request.path}"
    size = format_size(request.data_path.stat().st_size)
    return f"Written: {request.path}, and {request.data_path} ({size}: {', '.join(found.data)})"


def _check_path(request: ExportRequest) -> None:
    """Refuse to replace files that no export has written, or that were changed since."""
    if request.path.suffix != ".py":
        raise ConfigError(
            f"--export {request.path}: a script's name ends with .py.",
            fix=f"--export {request.path.with_suffix('.py')}",
        )
    if not request.path.parent.is_dir():
        raise ConfigError(f"There is no folder {request.path.parent}.", fix="make it, or --export to another one")
    is_ours = _is_as_exported(request.path)
    for path in (request.path, request.data_path):
        if not request.overwrite and os.path.lexists(path) and not is_ours:
            raise ConfigError(
                f"{path} exists already: no export has written it, or it has changed since.",
                fix="--export another name, or add --overwrite to replace it",
            )


def _is_as_exported(path: pathlib.Path) -> bool:
    try:
        first, _, rest = path.read_text(encoding="utf-8").partition("\n")
    except (OSError, ValueError):
        return False
    marked = _MARKED.fullmatch(f"{first}\n")
    return marked is not None and marked[1] == _checksum(rest)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _write_data(draft: pathlib.Path, found: ScriptContents, request: ExportRequest) -> list[str]:
    """Write the values without source, and return the lines that load them."""
    names: set[str] = set()
    while names != found.data.keys():  # the values' classes may need more
        names = set(found.data)
        _save(draft, found.data, found.name_of)
    if not names:
        return []
    found.imports |= {"import pathlib": None, "import sys": None, "import torch": None}
    is_safe = _is_only_weights(draft)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    how = "." if is_safe else f", pickled by Python {version}: load no such file that you don't trust."
    path = f'pathlib.Path(__file__).with_name("{request.data_path.name}")'
    return [
        f"# The values that have no source in the notebook are in {request.data_path.name}{how}",
        'sys.modules["__main__"] = sys.modules[__name__]  # has their classes, also in a spawned worker',
        f'_data = torch.load({path}, map_location="cpu", weights_only={is_safe})',
        *(f'{name} = _data["{name}"]  # {type(value).__name__}' for name, value in found.data.items()),
    ]


def _text(cell: Cell, request: ExportRequest, found: ScriptContents, body: Body, loading: Sequence[str]) -> str:
    settings = _settings(request)
    if settings:
        found.imports["import os"] = None
    shell = []
    if found.uses_shell:
        found.imports.update(dict.fromkeys(_IMPORTS_OF_SHELL))
        shell = [f"{inspect.getsource(ShellCommands)}\n\nget_ipython = ShellCommands  # for the notebook's !commands"]
    early, late = found.in_order()
    guarded = indented(f"{body.guarded}\n")
    sections = [
        "\n".join(sorted(found.imports, key=_place_of_import)),
        *shell,
        "\n".join([*settings, *(f"{name} = {text}" for name, text in found.literals.items())]),
        *early,
        "\n".join(loading),
        *late,
        *body.definitions,
        f'if __name__ == "__main__":\n{guarded}\n',
    ]
    text = "\n".join([*_usage(request), "", "\n\n\n".join(filter(None, sections))])
    return f"# Exported from {cell.label} by %%distributed --export (checksum {_checksum(text)}).\n{text}"


def _place_of_import(statement: str) -> tuple[bool, bool, str]:
    """Return the sort key of an import: ``__future__`` first, then the standard library, then the others."""
    module = statement.split()[1].partition(".")[0]
    return module != "__future__", module not in sys.stdlib_module_names, statement


def _usage(request: ExportRequest) -> list[str]:
    flags = []
    for option in config.fields():
        if option.name in request.given and option.name not in _NOT_FOR_SCRIPTS:
            value = request.given[option.name]
            if option.kind is bool:
                flags.append(f"--{option.name}" if value else f"--no-{option.name}")
            else:
                flags += [f"--{option.name}", shlex.quote(config.to_text(value))]
    count = request.options.num_processes or Devices.find(request.options).available
    name = shlex.quote(request.path.name)
    return [
        "#",
        f"#     {' '.join(['notebook-accel launch', *flags, name])}",
        f"#     torchrun --nproc_per_node {count} {name}",
        f"#     python {name}",
    ]


def _settings(request: ExportRequest) -> list[str]:
    """Return lines that set the environment variables for ``Accelerator`` as the launch would.

    The flags of the script's own launch win over them.
    """
    values = config.training_variables(request.options, environ={})
    return [f'os.environ.setdefault("{name}", "{value}")' for name, value in values.items()]


def _save(path: pathlib.Path, values: Mapping[str, Any], name_of: Callable[[Any], str]) -> None:
    """Save values as one dict, so that shared objects stay shared. ``name_of``: see ``ScriptContents.name_of``."""
    torch: Any = importlib.import_module("torch")
    pickling: Any = types.ModuleType("notebook_accel_export")  # torch takes its pickler from a module
    pickling.Pickler = _pickler(name_of)
    try:
        with path.open("wb") as file:
            torch.save(dict(values), file, pickle_module=pickling)
    except (CellError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the error names the value
        roots = {f'global "{name}"': value for name, value in values.items()}
        advice = "make it inside the cell, or leave it out of what the cell uses"

        def pickle_alone(obj: Any) -> None:
            pickling.Pickler(io.BytesIO(), protocol=2).dump(obj)

        raise unpicklable.explain(roots, error, pickle_alone, advice) from None


def _is_only_weights(path: pathlib.Path) -> bool:
    """Return whether the file can be read without running code from it."""
    torch: Any = importlib.import_module("torch")
    with contextlib.suppress(Exception):
        torch.load(path, map_location="meta", weights_only=True)
        return True
    return False


def _pickler(name_of: Callable[[Any], str]) -> type[Any]:
    class ExportPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        """Pickles functions and classes of the script by name, and others of the notebook by value."""

        dispatch_table: ClassVar[Any] = collections.ChainMap(unpicklable.STAYING, cloudpickle.Pickler.dispatch_table)

        def reducer_override(self, obj: Any) -> Any:
            is_notebooks = isinstance(obj, (type, types.FunctionType)) and obj.__module__ == "__main__"
            if is_notebooks and getattr(sys.modules["__main__"], obj.__name__, None) is obj and (name := name_of(obj)):
                return name
            return super().reducer_override(obj)

    return ExportPickler
