"""Drafts of a configuration file, for the form, the terminal's questions and ``write_basic_config``.

A draft starts from an existing file (ours or Accelerate's) or from the machine. It takes values one by one, checks
them, shows the resulting file, and writes it. An existing file is replaced only on request. Nothing here initialises
CUDA or imports torch.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from notebook_accel import config, config_file
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError, Finding
from notebook_accel.launching.kernel import preflight
from notebook_accel.launching.kernel.devices import Devices, Machine
from notebook_accel.launching.kernel.engine import check_engine_options

# Options that every file has, so that Accelerate can launch with it too. A form shows them first.
BASIC = ("num_processes", "mixed_precision", "use_cpu")
_WITHOUT_GPUS = Finding(
    "With use_cpu, ranks leave the cluster's GPUs alone.",
    "The option is about the machines of the ranks, not about this one.",
    "set use_cpu to false, unless the cluster has no GPU",
    refuses=False,
)


@dataclasses.dataclass(frozen=True)
class DraftSource:
    """A starting point of a draft: this machine, or a file."""

    label: str
    options: Mapping[str, Any]
    problems: tuple[str, ...] = ()  # a line about each setting that can't be used
    path: pathlib.Path | None = None


class Draft:
    """The options of a file that isn't written yet.

    Attributes:
        path: The file to write. Default: the file that launches read.
        machine: The machine that sets the basic options. Default: this machine.
        source: The starting point of the values.
        values: The value of each option, allowed or not.
    """

    def __init__(self, path: pathlib.Path | None = None, machine: Machine | None = None) -> None:
        self.path = path or config.default_path()
        self.machine = machine or Machine.find()
        self.source = self._basic()
        self.values: dict[str, Any] = {}
        self._look()
        self.fill(self.sources()[0])

    def _look(self) -> None:
        """Read the file's present content, with which ``write`` compares to find changes by others."""
        self._seen = _bytes_of(self.path)
        try:
            self._before = config_file.read(self.path).values if self.file_exists else {}
        except ConfigError:  # the file can only be replaced as a whole; the source's problems report it
            self._before = {}

    def sources(self) -> tuple[DraftSource, ...]:
        """Read and return all starting points. The first is an existing file, or else the machine."""
        found = [self._basic()]
        if self.file_exists:
            found.insert(0, _file_source("the existing file", self.path))
        theirs = config_file.accelerate_path()
        if os.path.exists(theirs) and theirs != self.path:
            found.append(_file_source("Accelerate's file", theirs))
        return tuple(found)

    def _basic(self) -> DraftSource:
        devices = self.machine.devices
        basic = {"num_processes": devices.available, "mixed_precision": "no", "use_cpu": devices.kind == "CPU"}
        return DraftSource("this machine", basic)

    def fill(self, source: DraftSource) -> None:
        """Set every option to its value in the source, or to its default."""
        self.source = source
        self.values = {option.name: source.options.get(option.name, option.default) for option in config.fields()}

    @property
    def file_exists(self) -> bool:
        """True if the path exists already, even as a broken link."""
        return os.path.lexists(self.path)

    def error(self, name: str) -> ConfigError | None:
        """Return the error that a launch would raise for the value of one option, ``None`` if it is allowed."""
        try:
            _allowed({name: self.values[name]})
        except ConfigError as error:
            return error
        return None

    def config(self) -> LaunchConfig:
        """Return the options. Raise ConfigError if one of them isn't allowed."""
        return _allowed(self.values)

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings against a launch with these options; none while an option isn't allowed."""
        try:
            launch = self.config()
        except ConfigError:
            return ()
        if launch.engine != "local":  # only a launch asks the cluster
            return (_WITHOUT_GPUS,) if launch.use_cpu else ()
        return preflight.check(launch, Devices("CPU", 1) if launch.use_cpu else self.machine.devices)

    def overriding(self, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
        """Return the environment variables that are set and override the file."""
        names = (name for option in config.fields() for name in config.variables_of(option, environ))
        return tuple(name for name in names if environ.get(name))

    def unfit(self, name: str) -> dict[str, str]:
        """Return the choices of an option that don't suit the devices, with the reasons. They are still allowed."""
        if name != "mixed_precision":
            return {}
        reasons = self.machine.precisions(use_cpu=self.values["use_cpu"] is True)
        return {choice: reason for choice, reason in reasons.items() if reason}

    def lines(self) -> tuple[str, ...]:
        """Return a diff from the present file to the draft, whose lines begin with ``+``, ``-`` or a blank.

        Raises:
            ConfigError: An option isn't allowed.
        """
        before, after = self._before, self._after()
        lines: list[str] = []
        for key in sorted({*before, *after}, key=str):
            old = config_file.dump({key: before[key]}).splitlines() if key in before else []
            new = config_file.dump({key: after[key]}).splitlines() if key in after else []
            if old and new and _is_same(before[key], after[key]):
                lines += [f"  {text}" for text in new]
            else:
                lines += [*(f"- {text}" for text in old), *(f"+ {text}" for text in new)]
        return tuple(lines)

    def _after(self) -> dict[str, Any]:
        """Return the new content: basic options, options that differ from their defaults, and others' harmless keys."""
        launch = self.config()
        names = {option.name for option in config.fields()}
        kept = {key: value for key, value in self._before.items() if key not in names}
        content = {key: value for key, value in kept.items() if config_file.is_harmless(key, value)}
        content |= {"compute_environment": "LOCAL_MACHINE", "debug": False}
        content["distributed_type"] = self._distributed_type(launch)
        for option in config.fields():
            value = getattr(launch, option.name)
            if value != option.default or (option.name in BASIC and value is not None):
                content[option.name] = list(value) if isinstance(value, tuple) else value
        return content

    def _distributed_type(self, launch: LaunchConfig) -> str:
        """Return Accelerate's ``distributed_type``, without which Accelerate doesn't read a file."""
        is_cpu = launch.use_cpu or self.machine.devices.kind == "CPU"
        count = launch.num_processes or (1 if is_cpu else self.machine.devices.available)
        return "NO" if count == 1 else "MULTI_CPU" if is_cpu else "MULTI_GPU"

    def write(self, *, overwrite: bool = False) -> pathlib.Path:
        """Write the file, and return its path.

        Raises:
            ConfigError: An option isn't allowed; or the file exists, without ``overwrite``; or it was changed
                meanwhile; or it can't be written.
        """
        content = self._after()
        if _bytes_of(self.path) != self._seen:
            self._look()
            raise ConfigError(
                f"The configuration file {self.path} was changed by another program in the meantime.",
                fix="check the new differences, and write again",
            )
        if self.file_exists and not overwrite:
            raise ConfigError(
                f"There is a configuration file already: {self.path}",
                fix="allow to replace it (the box in the form; --overwrite), or delete it",
            )
        config_file.write(self.path, content)
        self._look()
        return self.path


def _allowed(values: Mapping[str, Any]) -> LaunchConfig:
    launch = LaunchConfig().replace(**values)
    check_engine_options(launch)
    return launch


def _is_same(old: Any, new: Any) -> bool:
    """Return whether two values are equal in a file: 7 and 7.0 are, 1 and true aren't."""
    return bool(old == new) and isinstance(old, bool) == isinstance(new, bool)


def _file_source(label: str, path: pathlib.Path) -> DraftSource:
    try:
        options, problems = config.usable(config_file.read(path))
    except ConfigError as error:
        return DraftSource(label, {}, (error.what,), path)
    return DraftSource(label, options, problems, path)


def _bytes_of(path: pathlib.Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> pathlib.Path | Literal[False]:
    """Write a configuration file for this machine, as Accelerate's ``write_basic_config`` does. Initialises no device.

    Args:
        mixed_precision: ``no``, ``bf16`` or ``fp16``.
        save_location: The file. Default: the file that ``%%distributed`` and the command line read.

    Returns:
        The file's path; ``False`` if there is a file already, which stays unchanged.

    Raises:
        ConfigError: The precision doesn't exist, or the file can't be written.
    """
    path = config.default_path() if save_location is None else pathlib.Path(save_location)
    if os.path.lexists(path):
        print(f"There is a configuration file already, and it stays as it is: {path}")
        return False
    draft = Draft(path)
    draft.values["mixed_precision"] = mixed_precision.lower()
    draft.write()
    if reason := draft.unfit("mixed_precision").get(draft.values["mixed_precision"]):
        warnings.warn(f"mixed_precision={mixed_precision!r} {reason}.", stacklevel=2)
    return path
