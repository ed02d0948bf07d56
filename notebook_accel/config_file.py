"""Configuration files: YAML with the line of each key, written atomically, and Accelerate's keys explained.

Accelerate's files have keys that ``LaunchConfig`` doesn't. One that changes nothing about a run on one machine is fine;
one that asks for something that isn't done here is a problem with a line and a name, and so is a key that nobody knows:
training without what the file asks for would be another training.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import yaml

from notebook_accel.errors import ConfigError

__all__ = ["ConfigFile", "accelerate_path", "dump", "from_home", "is_harmless", "problems", "read", "write"]

_TEXT = "tag:yaml.org,2002:str"


@dataclasses.dataclass(frozen=True)
class _Ask:
    """A key of Accelerate, the values with which it asks for nothing, and the alternative here."""

    thing: str
    harmless: tuple[Any, ...] = ()
    instead: str = ""


# The keys of Accelerate 1.15 besides those that are options here. Empty values and `no` ask for nothing under each.
_ASKS: Mapping[str, _Ask] = {
    **dict.fromkeys(
        ("command_file", "commands", "tpu_env", "tpu_name", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_zone"),
        _Ask("a TPU pod"),
    ),
    "compute_environment": _Ask("a cloud service", ("LOCAL_MACHINE",)),
    "debug": _Ask("debug mode", instead="set the variable NOTEBOOK_ACCEL_DEBUG"),
    "deepspeed_config": _Ask("DeepSpeed"),
    "distributed_type": _Ask("another way of training", ("MULTI_CPU", "MULTI_GPU")),
    "downcast_bf16": _Ask("another meaning of float on TPUs"),
    "dynamo_backend": _Ask("a compiled model", instead="torch.compile the model in the cell"),
    "dynamo_config": _Ask("a compiled model", ({"dynamo_backend": "NO"},), "torch.compile the model in the cell"),
    "enable_cpu_affinity": _Ask("ranks bound to CPU cores"),
    "fp16": _Ask("what is another key now", instead="write mixed_precision: fp16"),
    "fp8_config": _Ask("FP8"),
    "fsdp_config": _Ask("FSDP"),
    "gpu_ids": _Ask("certain GPUs", ("all",), "set the variable CUDA_VISIBLE_DEVICES"),
    "ipex_config": _Ask("Intel's extension"),
    "megatron_lm_config": _Ask("Megatron-LM"),
    "mpirun_config": _Ask("mpirun"),
    "num_machines": _Ask("several machines", (1,), "write num_nodes, node_rank and master_addr"),
    "parallelism_config": _Ask("several kinds of parallelism"),
}
# They say how several machines find each other, or name a script's function: on one machine, from a notebook, nothing.
_SAY_NOTHING = frozenset({"machine_rank", "main_process_ip", "main_training_function", "same_network"})


@dataclasses.dataclass(frozen=True)
class ConfigFile:
    """The content of a file.

    Attributes:
        path: The file.
        values: The file's values, by key.
        lines: The line of each key, from 1.
        repeated: Keys that are there more than once. The last one counts.
    """

    path: pathlib.Path
    values: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    lines: Mapping[Any, int] = dataclasses.field(default_factory=dict)
    repeated: tuple[Any, ...] = ()


def accelerate_path() -> pathlib.Path:
    """Return the path of Accelerate's own file: below ``HF_HOME``, or else in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return from_home(home) / "accelerate" / "default_config.yaml"


def from_home(path: str) -> pathlib.Path:
    """Return the path with ``~`` expanded, unchanged for a user without an account."""
    return pathlib.Path(os.path.expanduser(path))


def read(path: pathlib.Path) -> ConfigFile:
    """Read a file.

    Raises:
        ConfigError: It can't be read, or it isn't YAML (which JSON is too), or isn't a table of options.
    """
    try:
        file, values = _parsed(path, path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
        raise _unreadable(path, f"{line}{error.problem}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"The configuration file {path} holds {type(values).__name__} instead of options.",
            why="It has one `option: value` a line.",
            fix=f"mend it or delete it: rm {path}",
        )
    return file


def _unreadable(path: pathlib.Path, why: str) -> ConfigError:
    return ConfigError(f"The configuration file {path} can't be read: {why}", fix=f"mend it or delete it: rm {path}")


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
    """Return whether YAML 1.1 takes ``1:2`` for 62, which nobody means by it."""
    return ":" in value.value and value.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def dump(values: Mapping[str, Any]) -> str:
    """Return the text of a YAML file with these values."""
    return str(yaml.safe_dump(dict(values), sort_keys=True))


def write(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Write a file, as JSON if its name says so. It is written beside and renamed: there is never half a file.

    Raises:
        ConfigError: The folder can't be written to.
    """
    if path.parts[:1] == ("~",):
        raise ConfigError(
            f"The configuration file {path} can't be written: this user has no home folder.",
            fix="set NOTEBOOK_ACCEL_CONFIG_FILE to the path of a file that you may write",
        )
    text = json.dumps(dict(values), indent=2, sort_keys=True) + "\n" if path.suffix == ".json" else dump(values)
    path = path.resolve()  # a link stays one
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
    """Return whether a key that is no option here is one of Accelerate's, with a value that asks for nothing more."""
    if key in _SAY_NOTHING:
        return True
    is_empty = not value or (isinstance(value, str) and value.lower() in {"no", "none", "false"})
    return key in _ASKS and (is_empty or value in _ASKS[key].harmless)


def problems(file: ConfigFile, options: Collection[str]) -> list[tuple[Any, str]]:
    """Return the keys of a file that are neither options nor harmless, with a line about each.

    Args:
        file: The file.
        options: The names of the options, whose values are not looked at.
    """
    found = [(key, f"{key} is there for the second time") for key in file.repeated]
    for key, value in file.values.items():
        if key in options or is_harmless(key, value):
            continue
        if key in _ASKS:
            shown = "" if isinstance(value, (dict, list)) else f": {value}"
            instead = f"; {_ASKS[key].instead}" if _ASKS[key].instead else ""
            found.append((key, f"{key}{shown} asks for {_ASKS[key].thing}, which isn't done here{instead}"))
        else:
            close = difflib.get_close_matches(str(key), options, n=1)
            found.append((key, f"there is no option {key!r}" + (f"; is it {close[0]}?" if close else "")))
    return found
