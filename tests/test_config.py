"""Options: bounds, flags, the order of their sources, and files of both tools."""

from __future__ import annotations

import argparse
import pathlib

import pytest

from notebook_accel import config, config_file, environment
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError


def write(file: pathlib.Path, text: str) -> pathlib.Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize(("options", "complaint"), [
    ({"num_processes": 0}, "num_processes=0 can't be used: it has to be >= 1."),
    ({"num_processes": -1}, "num_processes=-1 can't be used: it has to be >= 1."),
    ({"num_processes": "two"}, "num_processes='two' is not a whole number."),
    ({"num_processes": 2.5}, "num_processes=2.5 is not a whole number."),
    ({"num_processes": True}, "num_processes=True is not a whole number."),
    ({"mixed_precision": "int8"}, "mixed_precision='int8' is not known.\nFix: use one of no, bf16, fp16"),
    ({"mixed_precision": ["no"]}, "mixed_precision=['no'] is not known."),
    ({"use_cpu": 1}, "use_cpu=1 is not true or false."),
    ({"timeout_s": float("nan")}, "timeout_s=nan can't be used: it has to be > 0.0."),
    ({"timeout_s": "1 hour"}, "timeout_s='1 hour' is not a number."),
    ({"main_process_port": 65536}, "main_process_port=65536 can't be used: it has to be <= 65535."),
    ({"name": 5}, "name=5 is not text."),
    ({"name": "a\nb"}, r"name='a\nb' can't be used: it has characters that can't be printed."),
    ({"name": "\x1b[2Jb"}, r"name='\x1b[2Jb' can't be used: it has characters that can't be printed."),
    ({"name": "a\udcff"}, r"name='a\udcff' can't be used: it has characters that can't be printed."),
    ({"preload": "sklearn"}, "preload='sklearn' is not a list of names."),
    ({"preload": ["sklearn", 3]}, "preload=['sklearn', 3] is not a list of names."),
    ({"log_line_prefix_template": "$"}, "log_line_prefix_template='$' can't be used"),
    ({"log_line_prefix_template": "$ranks"}, "log_line_prefix_template='$ranks' can't be used"),
    ({"gpus": 2}, "There is no option 'gpus'.\nFix: use num_processes"),
    ({"colour": 2}, "There is no option 'colour'.\nFix: use one of allow_initialized_cuda, "),
])  # fmt: skip
def test_bad_value_is_one_clear_line_and_a_fix(options: dict, complaint: str) -> None:
    for given_to in (lambda: config.resolve(options, environ={}), lambda: LaunchConfig().replace(**options)):
        with pytest.raises(ConfigError) as caught:
            given_to()
        assert complaint in str(caught.value)
        assert "\nFix: " in str(caught.value)


def test_name_may_have_the_characters_of_any_language() -> None:
    name = "Übung 3/\u00a0\N{HIRAGANA LETTER A}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{PERSONAL COMPUTER}"
    assert LaunchConfig().replace(name=name).name == name


def test_replace_changes_a_copy() -> None:
    before = LaunchConfig(num_processes=2)
    after = before.replace(mixed_precision="bf16", timeout_s=5)
    assert (before.mixed_precision, before.timeout_s) == ("no", None)
    assert (after.num_processes, after.mixed_precision, after.timeout_s) == (2, "bf16", 5.0)


def test_arguments_win_over_environment_over_file_over_defaults(file: pathlib.Path) -> None:
    write(file, "num_processes: 2\ngrace_s: 3\nmixed_precision: bf16\n")
    environ = {"NOTEBOOK_ACCEL_NUM_PROCESSES": "4", "NOTEBOOK_ACCEL_GRACE_S": "5"}
    resolved = config.resolve({"num_processes": 8, "grace_s": None}, file=file, environ=environ)
    assert resolved == LaunchConfig(num_processes=8, grace_s=5.0, mixed_precision="bf16")


@pytest.mark.parametrize(("text", "value"), [("1", True), ("Yes", True), ("on", True), ("0", False), ("off", False)])
def test_yes_and_no_in_the_environment(text: str, value: bool) -> None:
    assert config.resolve({}, environ={"NOTEBOOK_ACCEL_USE_CPU": text}).use_cpu is value


def test_none_in_the_environment_undoes_what_the_file_says(file: pathlib.Path) -> None:
    write(file, "timeout_s: 5\n")
    assert config.resolve({}, file=file, environ={"NOTEBOOK_ACCEL_TIMEOUT_S": "none"}).timeout_s is None


@pytest.mark.parametrize("variable", ["NOTEBOOK_ACCEL_USE_CPU", "NOTEBOOK_ACCEL_NUM_PROCESSES"])
def test_bad_value_in_the_environment_is_refused(variable: str) -> None:
    with pytest.raises(ConfigError, match="'banana' is not"):
        config.resolve({}, environ={variable: "banana"})


def test_file_that_is_not_there_is_no_file_unless_a_variable_names_it(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.resolve({}, file=file, environ={}) == LaunchConfig()
    monkeypatch.setenv("NOTEBOOK_ACCEL_CONFIG_FILE", str(file))
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        config.resolve({}, file=config.default_path())


@pytest.mark.parametrize(
    ("option", "on", "off", "theirs"),
    [
        ("mixed_precision", "bf16", "no", {"ACCELERATE_MIXED_PRECISION": "BF16"}),
        ("gradient_accumulation_steps", 4, 1, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}),
        ("dynamo_backend", "inductor", "no", {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}),
        ("fsdp", True, False, {"ACCELERATE_USE_FSDP": "true"}),
        ("use_cpu", True, False, {"ACCELERATE_USE_CPU": "1"}),
        (
            "parallelism_config_tp_size",
            2,
            1,
            {"PARALLELISM_CONFIG_TP_SIZE": "2", "ACCELERATE_USE_PARALLELISM_CONFIG": "true"},
        ),
    ],
)
def test_variable_of_accelerates_counts_below_ours_and_below_arguments(
    option: str, on: object, off: object, theirs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {f"NOTEBOOK_ACCEL_{option.upper()}": str(off)}
    assert getattr(config.resolve({}, environ=theirs), option) == on
    assert getattr(config.resolve({}, environ={**theirs, **ours}), option) == off
    chosen = config.resolve({option: off}, environ=theirs)
    [variable, *_] = theirs
    assert config.training_variables(chosen, theirs)[variable] == str(off).lower()
    for name, text in {**theirs, **ours}.items():
        monkeypatch.setenv(name, text)
    assert getattr(config.resolve_call({option: None}), option) == on  # our variables don't count in a call
    assert getattr(config.resolve_call({option: off}), option) == off


def test_variable_that_an_argument_replaces_may_have_any_value() -> None:
    environ = {"ACCELERATE_MIXED_PRECISION": "fp8", "NOTEBOOK_ACCEL_NUM_PROCESSES": "all"}
    resolved = config.resolve({"mixed_precision": "bf16", "num_processes": 2}, environ=environ)
    assert resolved == LaunchConfig(mixed_precision="bf16", num_processes=2)


def test_sizes_of_a_mesh_that_is_not_asked_for_do_not_count() -> None:
    assert config.resolve({}, environ={"PARALLELISM_CONFIG_TP_SIZE": "2"}) == LaunchConfig()


def test_accelerates_variable_for_the_precision_counts_above_the_file(file: pathlib.Path) -> None:
    write(file, "mixed_precision: no\n")
    theirs = {"ACCELERATE_MIXED_PRECISION": "BF16"}
    assert config.resolve({}, file=file, environ=theirs).mixed_precision == "bf16"
    assert config.training_variables(config.resolve({"mixed_precision": "no"}, environ=theirs), {}) == {}
    with pytest.raises(ConfigError, match="ACCELERATE_MIXED_PRECISION can't be used: mixed_precision='fp8'"):
        config.resolve({}, environ={"ACCELERATE_MIXED_PRECISION": "fp8"})


def test_sharding_in_accelerates_words(file: pathlib.Path) -> None:
    write(
        file,
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        "  fsdp_offload_params: false\n  fsdp_transformer_layer_cls_to_wrap: A,B\n  fsdp_version: 2\n",
    )
    loaded = config.resolve({}, file=file, environ={})
    assert loaded.fsdp
    assert environment.fsdp_variables(loaded.fsdp_options) == {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_OFFLOAD_PARAMS": "False",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B",
        "FSDP_VERSION": "2",
    }
    write(file, "distributed_type: FSDP\nfsdp: false\nfsdp_config: {}\n")
    assert config.load(file) == {"fsdp": False}  # our own words count first


def test_variables_of_sharding_count_above_the_file_and_below_arguments(file: pathlib.Path) -> None:
    write(
        file,
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_min_num_params: 5\n  fsdp_version: 2\n"
        "  fsdp_transformer_layer_cls_to_wrap: [A, B]\n",
    )
    environ = {"FSDP_MIN_NUM_PARAMS": "6", "FSDP_TRANSFORMER_CLS_TO_WRAP": "C", "FSDP_VERSION": ""}
    resolved = config.resolve({}, file=file, environ=environ)
    assert config.training_variables(resolved, environ) == {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    for asked in ({"fsdp_options": ("min_num_params=7",)}, {}):
        ours = {} if asked else {"NOTEBOOK_ACCEL_FSDP_OPTIONS": "min_num_params=7"}
        resolved = config.resolve(asked, file=file, environ={**environ, **ours})
        assert config.training_variables(resolved, environ)["FSDP_MIN_NUM_PARAMS"] == "7"


def test_settings_of_sharding_are_checked_at_once() -> None:
    resolved = config.resolve({"fsdp_options": ("transformer_layer_cls_to_wrap=A", "transformer_layer_cls_to_wrap=B")})
    assert environment.fsdp_variables(resolved.fsdp_options)["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "A,B"
    for wrong in ("min_num_param=3", "version", "version="):
        with pytest.raises(ConfigError, match=f"fsdp_options has '{wrong}'") as raised:
            config.resolve({"fsdp_options": (wrong,)})
        assert "min_num_params" in (raised.value.fix or "")


def test_a_division_of_the_ranks_in_accelerates_words(file: pathlib.Path) -> None:
    write(
        file,
        "parallelism_config:\n  parallelism_config_cp_comm_strategy: allgather\n  parallelism_config_cp_size: 1\n"
        "  parallelism_config_dp_replicate_size: 1\n  parallelism_config_dp_shard_size: 2\n"
        "  parallelism_config_tp_size: 4\n",
    )
    variables = config.training_variables(config.resolve({}, file=file, environ={}))
    assert variables == {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2",
        "PARALLELISM_CONFIG_TP_SIZE": "4",
    }
    write(file, "use_cpu: true\nparallelism_config:\n  parallelism_config_cp_size: 2\n")
    with pytest.raises(ConfigError, match="line 2: parallelism_config_cp_size: 2 asks for context parallelism"):
        config.load(file)


def test_no_without_quotes_is_the_precision_not_false(file: pathlib.Path) -> None:
    assert config.load(write(file, "mixed_precision: no\nprofile: off\n")) == {
        "mixed_precision": "no",
        "profile": "off",
    }
    assert config.load(write(file, "profile: on\ndistributed_type: XLA\n")) == {"profile": "on"}


@pytest.mark.parametrize(("content", "complaint"), [
    ("num_processes: [", "can't be read: line 1: "),
    ("mixed_precision: no\nnum_proc", "can't be read: line 2: "),  # truncated
    ("num_proc", "holds str instead of options"),
    ("started: 2024-99-99\n", "can't be read: month must be in 1..12"),
    ("\x00", "can't be read: unacceptable character"),
    ("- a list\n", "holds list instead of options"),
    ("use_cpu: true\nnum_processes: 0\n", "line 2: num_processes=0 can't be used: it has to be >= 1"),
    ("mixed_precision: int8\n", r"line 1: mixed_precision='int8' is not known \(use one of no, bf16, fp16\)"),
    ("\nnum_proceses: 2\n", "line 2: there is no option 'num_proceses'; is it num_processes?"),
    ("use_cpu: true\nuse_cpu: false\n", "line 2: use_cpu occurs twice"),
    ("distributed_type: DEEPSPEED\n", "line 1: distributed_type: DEEPSPEED asks for another way of training"),
    ("use_cpu: true\nfsdp_config:\n  fsdp_offload: true\n", "line 2: fsdp_options has 'fsdp_offload=True'"),
    ("num_machines: 2\n", "asks for several machines, .*; write num_nodes, .* as num_processes the number on each"),
    ("gpu_ids: 0,1\n", "line 1: gpu_ids: 0,1 asks for certain GPUs, .*; set the variable CUDA_VISIBLE_DEVICES"),
])  # fmt: skip
def test_bad_file_is_named(file: pathlib.Path, content: str, complaint: str) -> None:
    write(file, content)
    with pytest.raises(ConfigError, match=complaint) as caught:
        config.resolve({}, file=file, environ={})
    assert str(file) in str(caught.value)


def test_everything_that_is_wrong_with_a_file_is_said_at_once(file: pathlib.Path) -> None:
    write(file, "deepspeed_config:\n  zero_stage: 3\nnum_processes: two\nsfdp: 1\nfsdp_config: {}\nuse_cpu: true\n")
    with pytest.raises(ConfigError) as caught:
        config.load(file)
    assert [line.split(" (")[0].partition("; --fsdp")[0].strip() for line in caught.value.what.splitlines()[1:]] == [
        "line 1: deepspeed_config asks for DeepSpeed, which isn't supported here",
        "line 3: num_processes='two' is not a whole number",
        "line 4: there is no option 'sfdp'; is it fsdp?",
    ]
    assert config.usable(config_file.read(file))[0] == {"use_cpu": True}


def test_value_as_text_is_that_value_again() -> None:
    for option in config.fields():
        for value in (option.default, *option.choices):
            assert config.from_text(option, config.to_text(value)) == value


def test_empty_file_sets_nothing(file: pathlib.Path) -> None:
    assert config.load(write(file, "# nothing yet\n")) == {}


def test_where_the_file_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert config.default_path() == tmp_path / "notebook_accel" / "default_config.yaml"
    monkeypatch.setenv("NOTEBOOK_ACCEL_CONFIG_FILE", "~/mine.yaml")
    assert config.default_path() == pathlib.Path.home() / "mine.yaml"


def test_every_option_says_what_it_is() -> None:
    options = config.fields()
    assert [option.name for option in options] == list(LaunchConfig.__struct_fields__)
    defaults = LaunchConfig()
    for option in options:
        assert option.help.endswith(".")
        assert option.default == getattr(defaults, option.name)
        assert option.kind in (bool, int, float, str, tuple)
        assert option.optional == (option.default is None)
        if option.choices:
            assert option.choices[0] == option.default


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="%%distributed", exit_on_error=False)
    config.add_flags(parser)
    return parser


def test_every_option_is_a_flag_with_its_help_and_default(parser: argparse.ArgumentParser) -> None:
    shown = " ".join(parser.format_help().split())
    for option in config.fields():
        assert f"--{option.name}" in shown
        assert " ".join(option.help.split()) in shown
        if option.default not in (None, "", ()):
            assert f"Default: {option.default}." in shown
        for choice in option.choices:
            assert choice in shown


def test_only_flags_that_were_given_count(parser: argparse.ArgumentParser) -> None:
    assert config.given_flags(parser.parse_args([])) == {}
    flags = "-n 2 --mixed_precision bf16 --use_cpu --no-allow_initialized_cuda --grace_s 0 --name run"
    assert config.given_flags(parser.parse_args(flags.split())) == {
        "num_processes": 2,
        "mixed_precision": "bf16",
        "use_cpu": True,
        "allow_initialized_cuda": False,
        "grace_s": 0.0,
        "name": "run",
    }
