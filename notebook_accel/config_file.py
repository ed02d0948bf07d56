"""Configuration files in YAML: reading with the line of each key, atomic writing, and checks of Accelerate's keys.

Accelerate's files have keys that are no options of ``LaunchConfig``. A key without an effect on one machine is ignored.
A key for an unsupported feature is reported as a problem with its line, and so is an unknown key: silently training
without the feature would give other results.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import pathlib
import shlex
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from notebook_accel import refusals
from notebook_accel.errors import ConfigError

_TEXT = "tag:yaml.org,2002:str"


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """The content of a file: the values by key, each key's line (from 1), and the keys that occur more than once.

    Of a repeated key, the last value counts.
    """

    path: pathlib.Path
    values: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    lines: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    repeated: tuple[Any, ...] = ()

    def unfolded(self) -> ConfigFile:
        """Return the file with the entries of two of Accelerate's tables as keys of their own, on the table's line.

        The tables are ``dynamo_config`` and ``parallelism_config``. The options ``fsdp`` and ``fsdp_options`` replace
        Accelerate's keys for sharded models.
        """
        values, lines = dict(self.values), dict(self.lines)

        def replace(key: str, by: Mapping[Any, Any]) -> None:
            for name, value in by.items():
                values.setdefault(name, value)
                lines.setdefault(name, lines.get(key, 0))

        for table in ("dynamo_config", "parallelism_config"):
            if isinstance(values.get(table), dict):
                replace(table, values.pop(table))
        if values.get("distributed_type") == "FSDP":
            replace("distributed_type", {"fsdp": True})
        if isinstance(values.get("fsdp_config"), dict):
            settings = values.pop("fsdp_config")
            options = [f"{name}={plain_text(value)}" for name, value in settings.items() if value is not None]
            replace("fsdp_config", {"fsdp_options": options} if options else {})
        return dataclasses.replace(self, values=values, lines=lines)


def plain_text(value: Any) -> str:
    """Return a setting as the text after ``name=``; a list as its items, with commas between them."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def accelerate_path() -> pathlib.Path:
    """Return the path of Accelerate's own file: below ``HF_HOME``, or else in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return from_home(home) / "accelerate" / "default_config.yaml"


def from_home(path: str) -> pathlib.Path:
    """Return the path with ``~`` expanded, unchanged for a user without an account."""
    return pathlib.Path(os.path.expanduser(path))


def read(path: pathlib.Path) -> ConfigFile:
    """Read a file. Raise a ``ConfigError`` if it can't be read, or isn't a table of options in YAML (or JSON)."""
    try:
        file, values = _parsed(path, path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise _unreadable(path, f"{line}{error.problem}") from error
    except IsADirectoryError:
        raise ConfigError(
            f"The configuration file {path} can't be read: it is a folder.",
            fix="name a file, with --config_file or the variable NOTEBOOK_ACCEL_CONFIG_FILE",
        ) from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"The configuration file {path} holds {type(values).__name__} instead of options.",
            why="It has one `option: value` a line.",
            fix=_fix(path),
        )
    return file


def _unreadable(path: pathlib.Path, why: str) -> ConfigError:
    return ConfigError(f"The configuration file {path} can't be read: {why}", fix=_fix(path))


def _fix(path: pathlib.Path) -> str:
    return f"mend it or delete it: rm {shlex.quote(str(path))}"


def _parsed(path: pathlib.Path, text: str) -> tuple[ConfigFile, Any]:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return ConfigFile(path), {}
        lines: dict[Any, int] = {}
        repeated: list[Any] = []
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(value, yaml.ScalarNode) and _is_of_base_60(value):
                value.tag = _TEXT
            if isinstance(key, yaml.ScalarNode):
                name = loader.construct_object(key)
                repeated += [name] if name in lines else []
                lines[name] = key.start_mark.line + 1
        values = loader.construct_document(node)
        return ConfigFile(path, values if isinstance(values, dict) else {}, lines, tuple(repeated)), values
    finally:
        loader.dispose()


def _is_of_base_60(value: yaml.ScalarNode) -> bool:
    """Return whether YAML 1.1 reads the value as a number of base 60, such as 62 for ``1:2``. Nobody means that."""
    return ":" in value.value and value.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def dump(values: Mapping[str, Any]) -> str:
    """Return the text of a YAML file with these values."""
    return str(yaml.safe_dump(dict(values), sort_keys=True))


def write(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Write a file atomically, as JSON if its name ends so."""
    if path.parts[:1] == ("~",):
        raise ConfigError(
            f"The configuration file {path} can't be written: this user has no home folder.",
            fix="set NOTEBOOK_ACCEL_CONFIG_FILE to the path of a file that you may write",
        )
    text = json.dumps(dict(values), indent=2, sort_keys=True) + "\n" if path.suffix == ".json" else dump(values)
    path = path.resolve()  # so that a link stays a link
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"The configuration file {path} can't be written: {error.strerror}.",
            fix="set NOTEBOOK_ACCEL_CONFIG_FILE to the path of a file that you may write",
        ) from error


def is_harmless(key: Any, value: Any) -> bool:
    """Return whether a key is one of Accelerate's, with a value that asks for no unsupported feature."""
    row = refusals.row_of_key(key)
    return row is not None and row.allows(value)


def problems(file: ConfigFile, options: Collection[str]) -> list[tuple[Any, str]]:
    """Return the keys of a file that are neither options nor harmless, with a line of text about each."""
    found = [(key, f"{key} occurs twice") for key in file.repeated]
    for key, value in file.values.items():
        if key in options or is_harmless(key, value):
            continue
        if row := refusals.row_of_key(key):
            shown = "" if isinstance(value, (dict, list)) else f": {value}"
            found.append((key, f"{key}{shown} asks for {row.feature}, which isn't supported here{row.advice}"))
        else:
            close = difflib.get_close_matches(str(key), options, n=1)
            found.append((key, f"there is no option {key!r}" + (f"; is it {close[0]}?" if close else "")))
    return found
