"""The options of a launch, each stated once with its name, type, bounds, default and help text.

Flags, form fields, validation and reference tables derive from ``LaunchConfig``. The file format is YAML with the keys
of Accelerate's ``default_config.yaml``, so that either tool reads the other's file.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from notebook_accel import config_file, environment, time_limit
from notebook_accel.errors import ConfigError

_SIZES = tuple(f"parallelism_config_{dimension}_size" for dimension in ("dp_replicate", "dp_shard", "tp"))
# The options that Accelerate has variables for.
OF_ACCELERATE = {
    "mixed_precision": environment.MIXED_PRECISION,
    "gradient_accumulation_steps": environment.GRADIENT_ACCUMULATION_STEPS,
    "dynamo_backend": f"{environment.DYNAMO}BACKEND",
    "fsdp": environment.USE_FSDP,
    "use_cpu": environment.USE_CPU,
    **{name: name.upper() for name in _SIZES},  # only together with USE_PARALLELISM
}
_IN_WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", tuple: "a list of names"
}  # fmt: skip
_PREFIX = r"^([^$\n]|\$\$|\$(role_name|rank|local_rank)\b|\$\{(role_name|rank|local_rank)\})*$"

# Control characters, line separators, and halves of surrogate pairs, which no terminal can show.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def _help(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class LaunchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a launch. The constructor checks nothing: ``resolve`` and ``replace`` do."""

    num_processes: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=4096)] | None,
        _help("Number of ranks. Default: one for each visible device, one on a machine with only a CPU."),
    ] = None
    mixed_precision: Annotated[
        Literal["no", "fp16", "bf16"], _help("Precision of the forward pass inside the ranks' Accelerator.")
    ] = "no"
    gradient_accumulation_steps: Annotated[
        Annotated[int, msgspec.Meta(ge=1)] | None,
        _help("Micro-batches that make one optimizer step, for Accelerators without a setting of their own."),
    ] = None
    dynamo_backend: Annotated[
        Literal["no", "aot_eager", "cudagraphs", "eager", "inductor", "onnxrt", "openxla", "tensorrt", "tvm"],
        _help("Backend by which the ranks' Accelerator compiles models, with torch.compile."),
    ] = "no"
    fsdp: Annotated[
        bool,
        _help("Shard the models that an Accelerator prepares over the ranks (FSDP 2): for models larger than a GPU."),
    ] = False
    fsdp_options: Annotated[
        tuple[str, ...],
        _help("Settings of fsdp, such as state_dict_type=full_state_dict, auto_wrap_policy=no_wrap, version=2."),
    ] = ()
    parallelism_config_dp_replicate_size: Annotated[
        Annotated[int, msgspec.Meta(ge=1)], _help("Copies of a model, each sharded over ranks of its own.")
    ] = 1
    parallelism_config_dp_shard_size: Annotated[
        Annotated[int, msgspec.Meta(ge=1)], _help("Ranks over which each copy of a model is sharded (FSDP 2).")
    ] = 1
    parallelism_config_tp_size: Annotated[
        Annotated[int, msgspec.Meta(ge=1)],
        _help("Ranks that compute the parts of each layer, on the same samples (tensor parallelism)."),
    ] = 1
    use_cpu: Annotated[bool, _help("Train on the CPU, with gloo, even if there are GPUs.")] = False
    start_method: Annotated[
        Literal["auto", "spawn", "fork", "inline"],
        _help(
            "How ranks are started. auto: fork on TPUs, else spawn. spawn: clean processes, forked from a template "
            "that never saw the kernel. fork: forks of the kernel, which share its objects without a copy. inline: "
            "one rank, in the kernel itself, for a debugger."
        ),
    ] = "auto"
    preload: Annotated[
        tuple[str, ...],
        _help("Modules that the template imports once, so that ranks have them at their start, such as transformers."),
    ] = ()
    allow_initialized_cuda: Annotated[
        bool,
        _help("Launch although CUDA is in use in the kernel. Ranks start clean, but the kernel's memory stays taken."),
    ] = False
    oversubscribe: Annotated[
        bool, _help("Let more ranks than there are GPUs share them, over gloo: slow, for debugging and tests.")
    ] = False
    timeout_s: Annotated[
        Annotated[float, msgspec.Meta(gt=0)] | None, _help("Stop the run after this many seconds. Default: no limit.")
    ] = None
    end_at: Annotated[
        str,
        _help(
            "The time limit: 23:30, 11.5h (from now) or 2026-05-01T08:00. Shortly before it, Accelerator.should_stop "
            "becomes true. Default: that of a Slurm job."
        ),
    ] = ""
    end_margin_s: Annotated[
        Annotated[float, msgspec.Meta(ge=0)],
        _help("Seconds before the time limit at which Accelerator.should_stop becomes true, to save the state."),
    ] = time_limit.DEFAULT_MARGIN_S
    grace_s: Annotated[
        Annotated[float, msgspec.Meta(ge=0, le=3600)],
        _help("Seconds that a rank has to end by itself after an interrupt, and again after SIGTERM, before SIGKILL."),
    ] = 2.0
    main_process_port: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=65535)] | None,
        _help("TCP port of the ranks' store. Default: a free one; for several nodes, which meet there, 29500."),
    ] = None
    num_nodes: Annotated[
        Annotated[int, msgspec.Meta(ge=1, le=9999)],
        _help("Number of nodes, each with as many ranks, launched from one notebook each."),
    ] = 1
    node_rank: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=9999)], _help("This node's number among several, from 0.")
    ] = 0
    master_addr: Annotated[
        Annotated[str, msgspec.Meta(min_length=1)], _help("Address of node 0, where several nodes meet.")
    ] = "127.0.0.1"
    max_restarts: Annotated[
        Annotated[int, msgspec.Meta(ge=0, le=10_000)],
        _help("How often a failure restarts all ranks, before the next failure ends the run."),
    ] = 0
    monitor_interval: Annotated[
        Annotated[float, msgspec.Meta(gt=0, le=60)],
        _help(
            "Seconds between two checks of the other nodes, in a run that may restart. A failure is noticed at once."
        ),
    ] = 0.1
    rdzv_backend: Annotated[
        Literal["static", "c10d"],
        _help("How several nodes meet. static: they are numbered, at node 0. c10d: any that come, at rdzv_endpoint."),
    ] = "static"
    rdzv_endpoint: Annotated[
        str, _help("HOST:PORT where several nodes meet. Default: master_addr and main_process_port.")
    ] = ""
    rdzv_conf: Annotated[
        tuple[str, ...],
        _help("How long several nodes wait for each other, in seconds, such as timeout=60 (join_timeout for c10d)."),
    ] = ()
    rdzv_id: Annotated[
        Annotated[str, msgspec.Meta(min_length=1, max_length=200)],
        _help("Name by which the nodes of a run find each other; ranks get it as TORCHELASTIC_RUN_ID."),
    ] = "none"
    name: Annotated[
        Annotated[str, msgspec.Meta(max_length=80)],
        _help("Name of the run in the panel. Default: the function's name, or the cell's number."),
    ] = ""
    keep_days: Annotated[
        Annotated[float, msgspec.Meta(gt=0, le=3650)],
        _help("Days for which the results, logs and curves of a detached run are kept after its end."),
    ] = 7.0
    log_dir: Annotated[
        str,
        _help(
            "Folder in which the ranks' logs stay. "
            "Default: a temporary one, which keeps those of the notebook's last 20 runs."
        ),
    ] = ""
    log_line_prefix_template: Annotated[
        Annotated[str, msgspec.Meta(pattern=_PREFIX)],
        _help("Prefix of a rank's lines in the notebook: text, ${role_name}, ${rank}, ${local_rank}."),
    ] = ""
    engine: Annotated[
        Literal["local", "ray"], _help("Where ranks run. local: on this machine. ray: on a Ray cluster.")
    ] = "local"
    engine_options: Annotated[
        tuple[str, ...],
        _help("Further settings of the engine, such as address=auto, strategy=SPREAD, gpus_per_rank=1, wait_s=60."),
    ] = ()
    profile: Annotated[
        Literal["on", "off"], _help("Whether ranks measure where the time of their steps goes, for the panel.")
    ] = "on"
    view: Annotated[
        Literal["auto", "panel", "lines", "none"],
        _help("How the run is shown. auto: the panel in a notebook with a front end, plain lines elsewhere."),
    ] = "auto"

    def replace(self, **changes: Any) -> LaunchConfig:
        """Return a copy with the given options changed.

        Raises:
            ConfigError: A value isn't allowed, or there is no such option.
        """
        return _checked({**msgspec.structs.asdict(self), **changes})


def training_variables(config: LaunchConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables by which an ``Accelerator`` finds these options.

    A default, such as the precision ``no``, needs a variable only to replace that of ``environ``, so that a script may
    have a setting of its own.
    """
    variables = environment.fsdp_variables(config.fsdp_options) if config.fsdp else {}
    if mesh_sizes(config):
        variables[environment.USE_PARALLELISM] = "true"
    for option in fields():
        variable, value = OF_ACCELERATE.get(option.name), getattr(config, option.name)
        if variable and value is not None and (value != option.default or variable in environ):
            variables[variable] = str(value).lower()
    return variables


def mesh_sizes(config: LaunchConfig) -> dict[str, int]:
    """Return the options by which ranks divide the work, if one is above 1. Their product is the number of ranks."""
    sizes = {name: getattr(config, name) for name in _SIZES}
    return sizes if max(sizes.values()) > 1 else {}


class Option(msgspec.Struct, frozen=True):
    """A field of ``LaunchConfig``, as flags and forms need it."""

    name: str
    help: str
    default: Any
    choices: tuple[str, ...]  # the allowed values where they are few, the default first; else empty
    kind: type  # of a value: ``bool``, ``int``, ``float``, ``str``, or ``tuple`` for several texts
    optional: bool  # whether ``None`` is allowed


@functools.cache
def fields() -> tuple[Option, ...]:
    """Return all options, in the order in which they are stated."""
    info = msgspec.inspect.type_info(LaunchConfig)
    assert isinstance(info, msgspec.inspect.StructType)
    return tuple(_option(field) for field in info.fields)


def _option(field: msgspec.inspect.Field) -> Option:
    declared: Any = field.type
    text = ""
    while isinstance(declared, msgspec.inspect.Metadata):
        text = text or (declared.extra_json_schema or {}).get("description", "")
        declared = declared.type
    members = declared.types if isinstance(declared, msgspec.inspect.UnionType) else (declared,)
    plain = next(member for member in members if not isinstance(member, msgspec.inspect.NoneType))
    kinds: dict[type, type] = {
        msgspec.inspect.BoolType: bool,
        msgspec.inspect.IntType: int,
        msgspec.inspect.FloatType: float,
        msgspec.inspect.VarTupleType: tuple,
    }
    return Option(
        name=field.name,
        help=text,
        default=field.default,
        choices=tuple(sorted(getattr(plain, "values", ()), key=lambda choice: (choice != field.default, choice))),
        kind=kinds.get(type(plain), str),
        optional=len(members) > 1,
    )


def default_path() -> pathlib.Path:
    """Return the configuration file's path: ``NOTEBOOK_ACCEL_CONFIG_FILE``, or one in the user's cache folder."""
    named = os.environ.get(environment.CONFIG_FILE)
    if named:
        return config_file.from_home(named)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return config_file.from_home(cache) / "notebook_accel" / "default_config.yaml"


def load(path: pathlib.Path) -> dict[str, Any]:
    """Return the options that a file sets, without Accelerate's keys that have no effect here.

    Raises a ``ConfigError`` that names all values that aren't allowed and keys that aren't supported, with their lines.
    """
    options, problems = usable(config_file.read(path))
    if problems:
        raise ConfigError(
            f"The configuration file {path} can't be used:\n" + "\n".join(f"  {problem}" for problem in problems),
            fix="correct or delete these lines, write another file with `%distributed config`, or delete the file",
        )
    return options


def usable(file: config_file.ConfigFile) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the usable options of a file, and a line about everything else in it."""
    known = {option.name: option for option in fields()}
    file = file.unfolded()
    found = config_file.problems(file, known)
    options: dict[str, Any] = {}
    for name in file.values.keys() & known.keys():
        value = file.values[name]
        if isinstance(value, bool) and known[name].choices:  # YAML 1.1 reads a bare `no`, `off` or `on` as a boolean
            words = ("yes", "on") if value else ("no", "off")
            value = next((word for word in words if word in known[name].choices), value)
        elif isinstance(value, str) and value.lower() in known[name].choices:
            value = value.lower()  # Accelerate writes the names of backends in capitals
        try:
            _checked({name: value})
        except ConfigError as error:
            found.append((name, f"{error.what.rstrip('.')} ({error.fix})"))
        else:
            options[name] = value
    by_line = sorted((file.lines.get(key, 0), text) for key, text in found)
    return options, tuple(f"line {line}: {text}" if line else text for line, text in by_line)


def resolve(
    arguments: Mapping[str, Any], *, file: pathlib.Path | None = None, environ: Mapping[str, str] = os.environ
) -> LaunchConfig:
    """Merge defaults < file < environment < arguments.

    Args:
        arguments: Options that were given in code or as flags; ``None`` counts as not given.
        file: A configuration file. It is ignored if it doesn't exist or its folder can't be read, unless a variable of
            this process names it.
        environ: The environment to read.

    Raises:
        ConfigError: A value isn't allowed, wherever it came from; or there is no file that a variable names.
    """
    from_file = load(file) if file is not None and _is_there(file) else {}
    if "fsdp_options" in from_file:
        from_file["fsdp_options"] = environment.without_variables(from_file["fsdp_options"], environ)
    given = {name: value for name, value in arguments.items() if value is not None}
    return _checked(from_file | of_environment(environ, given) | given)


def resolve_call(arguments: Mapping[str, Any]) -> LaunchConfig:
    """Merge defaults < Accelerate's variables < arguments: no file or variable of ours counts for a call in code."""
    theirs = (*OF_ACCELERATE.values(), environment.USE_PARALLELISM)
    return resolve(arguments, environ={name: os.environ.get(name, "") for name in theirs})


def of_environment(environ: Mapping[str, str] = os.environ, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the options that variables set: ``NOTEBOOK_ACCEL_<OPTION>``, or else Accelerate's variable.

    Variables for the options ``without`` aren't read.

    Raises:
        ConfigError: A value isn't allowed.
    """
    found = {}
    present = dict(environ)  # each look into os.environ takes four calls
    for option in fields():
        variable = next(filter(present.get, variables_of(option, present)), None)
        if variable is not None and option.name not in without:
            found[option.name] = _from_variable(option, variable, present[variable])
    return found


def variables_of(option: Option, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables that can set an option; the first that is set counts."""
    ours = f"NOTEBOOK_ACCEL_{option.name.upper()}"
    theirs = OF_ACCELERATE.get(option.name)
    if option.name in _SIZES and not environment.is_true(environ.get(environment.USE_PARALLELISM, "")):
        return (ours,)
    return (ours,) if theirs is None else (ours, theirs)


def _from_variable(option: Option, variable: str, text: str) -> Any:
    value = from_text(option, text.lower() if option.choices else text)
    try:
        _checked({option.name: value})
    except ConfigError as error:
        what = f"The environment variable {variable} can't be used: {error.what}"
        raise ConfigError(what, fix=f"unset {variable}; or {error.fix}") from None
    return value


def _is_there(file: pathlib.Path) -> bool:
    if not os.environ.get(environment.CONFIG_FILE) or file != default_path():
        return os.path.exists(file)  # also false in an unreadable home, as on a root-squashed file system
    try:
        file.stat()
    except OSError as error:
        raise ConfigError(
            f"The configuration file {file} can't be read: {error.strerror}.",
            fix=f"unset {environment.CONFIG_FILE}, which names it, or notebook-accel config to write it",
        ) from None
    return True


def from_text(option: Option, text: str) -> Any:
    """Return the value for the text of a flag or a variable. Text that can't be converted is returned unchanged."""
    if option.optional and text.lower() in {"none", ""}:
        return None
    if option.kind is bool:
        return environment.is_true(text) if environment.is_flag(text) else text
    if option.kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return option.kind(text)
    except ValueError:
        return text


def to_text(value: Any) -> str:
    """Return the text that a person would type for a value: the inverse of ``from_text``."""
    if isinstance(value, (list, tuple)):
        return ", ".join(value)
    return "" if value is None else str(value)


def _checked(values: Mapping[str, Any]) -> LaunchConfig:
    try:
        checked = msgspec.convert(dict(values), LaunchConfig)
    except msgspec.ValidationError as error:
        raise _refusal(values, str(error)) from None
    if _UNPRINTABLE.search(checked.name):
        raise ConfigError(
            f"name={checked.name!r} can't be used: it has characters that can't be printed.",
            fix="leave out line breaks and control characters",
        )
    if checked.fsdp_options:
        environment.fsdp_variables(checked.fsdp_options)
    if checked.end_at:
        time_limit.parse(checked.end_at)
    return checked


def _refusal(given: Mapping[str, Any], text: str) -> ConfigError:
    """Return the error for msgspec's message, such as "Expected `int` >= 1 - at `$.num_processes`"."""
    known = {option.name: option for option in fields()}
    unknown = next((name for name in given if name not in known), "")
    if unknown:
        fix = closest_name(unknown, known) or f"one of {', '.join(sorted(known))}"
        return ConfigError(f"There is no option {unknown!r}.", fix=f"use {fix}")
    what, _, where = text.rpartition(" - at `$.")
    option = known[where.rstrip("`").partition("[")[0]]
    shown = f"{option.name}={given[option.name]!r}"
    if option.choices:
        return ConfigError(f"{shown} is not known.", fix=f"use one of {', '.join(option.choices)}")
    told = f"{shown} is not {_IN_WORDS[option.kind]}."
    if ", got `" not in what:  # the type is right
        told = f"{shown} can't be used: it has to be {what.rpartition('` ')[2]}."
    return ConfigError(told, fix="true or false" if option.kind is bool else f"{option.name}: {option.help}")


_SHORT = {"num_processes": ("-n",), "fsdp": ("--use_fsdp",)}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each option. A flag that isn't given leaves ``None``, so that other sources can decide."""
    for option in fields():
        flags = [f"--{option.name}", *_SHORT.get(option.name, ())]
        text = option.help if option.default in (None, "", ()) else f"{option.help} Default: {option.default}."
        text = text.replace("%", "%%")  # argparse formats it
        if option.kind is bool:
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            # Text that can't be converted goes on to LaunchConfig, which raises all such errors.
            read = functools.partial(from_text, option)
            parser.add_argument(*flags, default=None, metavar=_metavar(option), type=read, help=text)


def _metavar(option: Option) -> str:
    if option.kind is tuple:
        return "NAME,..."
    return "{" + ",".join(option.choices) + "}" if option.choices else option.kind.__name__.upper()


def given_flags(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given as flags."""
    return {option.name: value for option in fields() if (value := getattr(namespace, option.name, None)) is not None}


# Names of options in other launchers: torchrun, Lightning, mpirun, Accelerate, and its notebook_launcher.
_NAMES_ELSEWHERE = {
    "--num_processes": ("np", "nproc", "nproc_per_node", "gpus", "num_gpus", "devices", "ranks", "workers"),
    "--num_nodes": ("nnodes", "num_machines"),
    "--mixed_precision": ("fp16", "bf16", "amp"),
    "--main_process_port": ("use_port", "master_port"),
    "--use_port": ("main_process_port", "master_port"),
}
_CLOSE = 0.7  # difflib's ratio from which a word counts as a misspelt flag


def closest_flag(word: str, flags: Iterable[str]) -> str:
    """Return the known flag that is closest to an unknown one; empty if none is close.

    A flag that contains the word, as ``--use_cpu`` does ``--cpu``, is closer than one of similar spelling.
    """
    name = word.partition("=")[0]
    flags = list(flags)
    elsewhere = [flag for flag, names in _NAMES_ELSEWHERE.items() if name.strip("-") in names and flag in flags]
    longer = [flag for flag in flags if name.strip("-") in flag.strip("-").split("_")]
    return next(iter([*elsewhere, *longer, *difflib.get_close_matches(name, flags, cutoff=_CLOSE)]), "")


def closest_name(word: str, names: Iterable[str]) -> str:
    """Return the name that is closest to an unknown one, as ``closest_flag`` does with flags."""
    return closest_flag(f"--{word}", [f"--{name}" for name in names]).removeprefix("--")
