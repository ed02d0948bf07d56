"""``%%distributed --export train.py``: write a cell as a script that needs no notebook, without running any code."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import importlib
import io
import itertools
import os
import pathlib
import re
import shlex
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import cloudpickle

from notebook_accel import config
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import CellError, ConfigError
from notebook_accel.exporting import export_contents, plain_python
from notebook_accel.exporting.export_contents import ScriptContents
from notebook_accel.exporting.plain_python import Body
from notebook_accel.formatting import format_size
from notebook_accel.launching.kernel import cell as cells
from notebook_accel.launching.kernel.cell import Cell
from notebook_accel.launching.kernel.devices import Devices
from notebook_accel.payload import unpicklable

_MARKED = re.compile(r"# Exported from .+ by %%distributed --export \(checksum ([0-9a-f]{12})\)\.\n")
_NOT_FOR_SCRIPTS = frozenset({"name", "view", "allow_initialized_cuda", "start_method", "preload"})


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

    ``history`` has the cells that were run, in order, from number 0, with IPython's syntax translated.

    Raises:
        CellError: The cell can't be a script. The message has the reason and the line.
        ConfigError: The file can't be written.
        PayloadError: Data can't be pickled.
    """
    _check_path(request)
    source, modules = plain_python.plain(cell.source, cell.label, {*namespace, *(cell.assigns or ())})
    cell = cells.parse(source, cell.label)
    if cell.assigns is not None:
        cell = dataclasses.replace(cell, assigns=cell.assigns | modules)
    body = Body(source, cell.calls, request.args)
    contents = export_contents.collect(cell, body, namespace, history, request.push)
    contents.imports.update({f"import {module}": None for module in sorted(modules)})
    draft = request.data_path.with_name(f"{request.data_path.name}.{os.getpid()}.tmp")
    try:
        loading = _write_data(draft, contents, request)
        text = _text(cell, request, contents, body, loading)
        if contents.data:
            os.replace(draft, request.data_path)
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, request.path)
        return _report(request, contents)
    except OSError as error:
        raise ConfigError(
            f"{request.path} can't be written: {error.strerror}.", fix="--export with a path that you may write to"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


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


def _write_data(draft: pathlib.Path, contents: ScriptContents, request: ExportRequest) -> list[str]:
    """Write the values without source, and return the lines that load them."""
    names: set[str] = set()
    while names != contents.data.keys():  # the values' classes may need more
        names = set(contents.data)
        written = _save(draft, contents.data, contents.name_of)
    if not names:
        return []
    contents.imports |= {"import pathlib": None, "import torch": None}
    is_safe = _is_only_weights(draft)
    how = "." if is_safe else ", pickled: load no such file that you don't trust."
    lines = [f"# The values that have no source in the notebook are in {request.data_path.name}{how}"]
    if written.by_value:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        lines.append(
            f"# By value, for Python {version} (cloudpickle), since they have no source: {', '.join(written.by_value)}."
        )
    if written.by_name:
        contents.imports["import sys"] = None
        lines.append('sys.modules["__main__"] = sys.modules[__name__]  # has their classes, also in a spawned worker')
    path = f'pathlib.Path(__file__).with_name("{request.data_path.name}")'
    lines.append(f'_data = torch.load({path}, map_location="cpu", weights_only={is_safe})')
    return [*lines, *(f'{name} = _data["{name}"]  # {_kind(value)}' for name, value in contents.data.items())]


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__}{f' {tuple(shape)}' if isinstance(shape, tuple) else ''}"


def _text(cell: Cell, request: ExportRequest, contents: ScriptContents, body: Body, loading: Sequence[str]) -> str:
    settings = _settings(request)
    if settings:
        contents.imports["import os"] = None
    before, after = contents.in_order()
    guarded = plain_python.indented(f"{body.guarded}\n")
    sections = [
        "\n".join(_sorted_imports([*contents.import_statements(), *body.imports])),
        "\n".join([*settings, *(f"{name} = {text}" for name, text in contents.literals.items())]),
        *before,
        "\n".join(loading),
        *after,
        *body.definitions,
        f'if __name__ == "__main__":\n{guarded}',
    ]
    text = "\n".join([*_usage(request), "", _spaced([section for section in sections if section])])
    head = f"# Exported from {cell.label} by %%distributed --export (checksum {_checksum(text)}).\n"
    try:
        compile(text, request.path.name, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise CellError(
            f"{cell.label} can't be exported: as a script it is not Python: {error.msg}, in: {error.text}"
        ) from error
    return head + text


def _spaced(sections: Sequence[str]) -> str:
    """Join the sections, with two blank lines around functions and classes and one between others."""
    text = sections[0]
    for above, section in itertools.pairwise(sections):
        is_block = any(re.search(r"^(async def|def|class|if) ", part, re.MULTILINE) for part in (above, section))
        text += ("\n\n\n" if is_block else "\n\n") + section
    return f"{text}\n"


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


def _sorted_imports(statements: Iterable[str]) -> list[str]:
    """Return each import once: ``__future__`` first, then the standard library, then the others."""

    def key(statement: str) -> tuple[int, bool, str]:
        module = statement.split()[1].partition(".")[0]
        group = 0 if module == "__future__" else 1 if module in sys.stdlib_module_names else 2
        return group, statement.startswith("from"), statement

    ordered = sorted(dict.fromkeys(statements), key=key)
    lines: list[str] = []
    for statement, above in zip(ordered, ["", *ordered], strict=False):
        if above and key(statement)[0] != key(above)[0]:
            lines.append("")
        lines.append(statement)
    return lines


def _report(request: ExportRequest, contents: ScriptContents) -> str:
    lines = [f"Written: {request.path}"]
    if contents.data:
        size = format_size(request.data_path.stat().st_size)
        lines[0] += f", and {request.data_path} ({size}: {', '.join(contents.data)})"
    missing = _modules_beside_the_notebook(contents.imports)
    here = pathlib.Path.cwd()
    if missing and request.path.parent.resolve() != here:
        names = ", ".join(missing)
        lines.append(f"It imports {names} from {here}, so copy that beside it, or set PYTHONPATH={here}")
    return "\n".join(lines)


def _modules_beside_the_notebook(imports: Iterable[str]) -> list[str]:
    """Return the modules that Python finds in the kernel's working directory, not among packages."""
    names = dict.fromkeys(statement.split()[1].partition(".")[0] for statement in imports)
    files = {name: pathlib.Path(getattr(sys.modules.get(name), "__file__", None) or os.devnull) for name in names}
    here = pathlib.Path.cwd()
    return [name for name, file in files.items() if file.parent == here or file.parent.parent == here]


@dataclasses.dataclass
class _DataContents:
    """The functions and classes in a data file: references to the script's by name, and the notebook's by value."""

    by_name: dict[str, None] = dataclasses.field(default_factory=dict)
    by_value: dict[str, None] = dataclasses.field(default_factory=dict)


def _save(path: pathlib.Path, values: Mapping[str, Any], name_of: Callable[[Any], str]) -> _DataContents:
    """Save values as one dict, so that shared objects stay shared. ``name_of``: see ``ScriptContents.name_of``."""
    torch: Any = importlib.import_module("torch")
    pickling: Any = types.ModuleType("notebook_accel_export")  # torch takes its pickler from a module
    contents = _DataContents()
    pickling.Pickler = _pickler(name_of, contents)
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
    return contents


def _is_only_weights(path: pathlib.Path) -> bool:
    """Return whether the file can be read without running code from it."""
    torch: Any = importlib.import_module("torch")
    with contextlib.suppress(Exception):
        torch.load(path, map_location="meta", weights_only=True)
        return True
    return False


def _pickler(name_of: Callable[[Any], str], contents: _DataContents) -> type[Any]:
    class ExportPickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
        dispatch_table: ClassVar[Any] = collections.ChainMap(unpicklable.STAYING, cloudpickle.Pickler.dispatch_table)

        def reducer_override(self, obj: Any) -> Any:
            if not isinstance(obj, (type, types.FunctionType)):
                return super().reducer_override(obj)
            if obj.__module__ == "__main__" and getattr(sys.modules["__main__"], obj.__name__, None) is obj:
                name = name_of(obj)
                if name:
                    contents.by_name[name] = None
                    return name
            reduced = super().reducer_override(obj)
            if reduced is not NotImplemented and obj.__module__ == "__main__":
                contents.by_value[obj.__qualname__] = None
            return reduced

    return ExportPickler
