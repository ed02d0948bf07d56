"""A configuration file in the making: where it starts, what would change, and that it is written only when told to."""

from __future__ import annotations

import json
import pathlib

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import write_basic_config as write_theirs
from hypothesis import given
from hypothesis import strategies as st

from notebook_accel import config, write_basic_config
from notebook_accel.config import LaunchConfig
from notebook_accel.errors import ConfigError
from notebook_accel.launching.kernel.config_draft import Draft
from notebook_accel.launching.kernel.devices import Devices, Gpu, Machine
from tests.test_config import write

_CPU = Machine(Devices("CPU", 1), cores=2, memory_bytes=8 << 30)
_GPUS = Machine(Devices("GPU", 2), (Gpu("Tesla T4", 15 << 30, (7, 5)),) * 2)


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_without_a_file_it_starts_from_the_machine(file: pathlib.Path) -> None:
    draft = Draft(file, _GPUS)
    assert draft.config() == LaunchConfig(num_processes=2)
    assert [source.label for source in draft.sources()] == ["this machine"]
    assert not file.parent.exists()
    assert [str(line) for line in draft.lines()] == [
        "+ compute_environment: LOCAL_MACHINE",
        "+ debug: false",
        "+ distributed_type: MULTI_GPU",
        "+ mixed_precision: 'no'",
        "+ num_processes: 2",
        "+ use_cpu: false",
    ]
    assert draft.write() == file
    assert config.resolve({}, file=file, environ={}) == LaunchConfig(num_processes=2)
    assert {line[0] for line in draft.lines()} == {" "}


@given(st.builds(
    LaunchConfig,
    num_processes=st.none() | st.integers(1, 4096),
    mixed_precision=st.sampled_from(["no", "fp16", "bf16"]),
    use_cpu=st.booleans(),
    grace_s=st.floats(0, 3600),
    timeout_s=st.none() | st.floats(min_value=0.001, allow_infinity=False),
    name=st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp")), max_size=80),
))  # fmt: skip
def test_written_configuration_loads_as_it_was(tmp_path_factory: pytest.TempPathFactory, launch: LaunchConfig) -> None:
    draft = Draft(tmp_path_factory.mktemp("config") / "config.yaml", _GPUS)
    draft.values = {option.name: getattr(launch, option.name) for option in config.fields()}
    assert config.resolve({}, file=draft.write(), environ={}) == launch


def test_a_file_is_read_shown_against_what_would_be_and_replaced_only_when_told_to(file: pathlib.Path) -> None:
    write(file, "compute_environment: LOCAL_MACHINE\ngrace_s: 5\nnum_processes: 4\nmain_training_function: main\n")
    draft = Draft(file, _CPU)
    assert draft.source.path == file
    assert (draft.values["grace_s"], draft.values["num_processes"]) == (5, 4)
    draft.values["num_processes"] = 2
    shown = [str(line) for line in draft.lines()]
    assert "- num_processes: 4" in shown and "+ num_processes: 2" in shown
    assert "  main_training_function: main" in shown and "  grace_s: 5.0" in shown
    before = file.read_text()
    with pytest.raises(ConfigError, match="There is a configuration file already"):
        draft.write()
    assert file.read_text() == before
    draft.write(overwrite=True)
    assert "main_training_function: main" in file.read_text() and "num_processes: 2" in file.read_text()


def test_a_file_that_another_wrote_in_the_meantime_is_not_lost(file: pathlib.Path) -> None:
    draft = Draft(file, _CPU)
    write(file, "num_processes: 3\n")
    with pytest.raises(ConfigError, match="changed by another program"):
        draft.write(overwrite=True)
    with pytest.raises(ConfigError, match="already"):
        draft.write()
    assert file.read_text() == "num_processes: 3\n"
    assert "- num_processes: 3" in [str(line) for line in draft.lines()]
    draft.write(overwrite=True)
    assert "num_processes: 1" in file.read_text()


def test_what_cannot_be_honoured_is_named_and_goes(file: pathlib.Path) -> None:
    write(file, "deepspeed_config:\n  zero_stage: 3\nmixed_precision: bf16\n")
    draft = Draft(file, _CPU)
    (problem,) = draft.source.problems
    assert problem.startswith("line 1: deepspeed_config asks for DeepSpeed, which isn't supported here; --fsdp")
    assert draft.values["mixed_precision"] == "bf16"
    assert {"- deepspeed_config:", "-   zero_stage: 3"} <= {str(line) for line in draft.lines()}
    draft.write(overwrite=True)
    assert config.load(file)["mixed_precision"] == "bf16"


def test_a_file_that_is_no_configuration_is_said_and_stays_until_replaced(file: pathlib.Path) -> None:
    write(file, "num_processes: [")
    draft = Draft(file, _CPU)
    assert "can't be read: line 1" in draft.source.problems[0]
    with pytest.raises(ConfigError, match="already"):
        draft.write()
    assert draft.write(overwrite=True).read_text().startswith("compute_environment")


def test_accelerates_file_is_offered_and_not_taken_by_itself(file: pathlib.Path, tmp_path: pathlib.Path) -> None:
    theirs = write(
        tmp_path / "cache/huggingface/accelerate/default_config.yaml", "mixed_precision: bf16\nnum_processes: 4\n"
    )
    draft = Draft(file, _CPU)
    assert draft.values["num_processes"] == 1
    offered = draft.sources()[-1]
    assert offered.path == theirs
    draft.fill(offered)
    assert (draft.values["mixed_precision"], draft.values["num_processes"]) == ("bf16", 4)
    draft.write()
    assert theirs.read_text() == "mixed_precision: bf16\nnum_processes: 4\n"


def test_a_wrong_value_is_an_error_in_the_launchs_words(file: pathlib.Path) -> None:
    draft = Draft(file, _CPU)
    draft.values["num_processes"] = 0
    said = draft.error("num_processes")
    assert said is not None and draft.error("grace_s") is None
    assert said.what == "num_processes=0 can't be used: it has to be >= 1."
    for refused in (draft.lines, draft.write):
        with pytest.raises(ConfigError, match="num_processes=0"):
            refused()
    assert not file.exists()


def test_what_speaks_against_a_launch_is_found_for_the_machine_of_the_draft(file: pathlib.Path) -> None:
    draft = Draft(file, _GPUS)
    draft.values["num_processes"] = 3
    assert "3 processes were asked for, and there are 2 GPUs." in draft.findings()[0].what
    draft.values["use_cpu"] = True
    assert draft.findings() == ()
    assert draft.unfit("mixed_precision") == {"fp16": "needs a GPU"}
    assert draft.unfit("view") == {}


def test_variables_that_win_over_the_file(file: pathlib.Path) -> None:
    environ = {"NOTEBOOK_ACCEL_NUM_PROCESSES": "2", "NOTEBOOK_ACCEL_NAME": "", "ACCELERATE_DYNAMO_BACKEND": "NO"}
    names = ("NOTEBOOK_ACCEL_NUM_PROCESSES", "ACCELERATE_DYNAMO_BACKEND")
    assert Draft(file, _CPU).overriding(environ) == names


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_basic_config_is_accelerates(
    tmp_path: pathlib.Path, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = tmp_path / "ours.yaml", tmp_path / "theirs.yaml"
    assert write_basic_config(precision, str(ours)) == ours
    assert write_theirs(precision, str(theirs)) == theirs
    content = yaml.safe_load(ours.read_text())
    assert content.items() <= json.loads(theirs.read_text()).items()
    assert load_config_from_file(str(ours)).to_dict() == load_config_from_file(str(theirs)).to_dict()
    assert config.resolve({}, file=ours, environ={}) == config.resolve({}, file=theirs, environ={})
    before = ours.read_text()
    assert write_basic_config("no", ours) is write_theirs("no", str(theirs)) is False
    assert ours.read_text() == before
    assert f"stays as it is: {ours}" in capsys.readouterr().out


def test_basic_config_goes_where_launches_look() -> None:
    assert write_basic_config(mixed_precision="BF16") == config.default_path()
    assert config.resolve({}, file=config.default_path(), environ={}).mixed_precision == "bf16"


def test_basic_config_with_a_precision_that_does_not_fit(file: pathlib.Path) -> None:
    with pytest.warns(UserWarning, match="mixed_precision='fp16' needs a GPU"):
        assert write_basic_config("fp16", file) == file
    with pytest.raises(ValueError, match="mixed_precision='fp8' is not known"):
        write_basic_config("fp8", file.with_name("other.yaml"))
    assert not file.with_name("other.yaml").exists()


def test_cluster_is_written_with_its_options_which_are_known_without_it(file: pathlib.Path) -> None:
    draft = Draft(file, _CPU)
    draft.values |= {"engine": "ray", "engine_options": ("strategy=SPREAD", "pace=high"), "num_processes": 16}
    error = draft.error("engine_options")
    assert error is not None and error.what == "The engine option 'pace=high' is not known."
    with pytest.raises(ConfigError, match="'pace=high' is not known"):
        draft.write()
    draft.values["engine_options"] = ("strategy=SPREAD", "nodes=2")
    assert draft.error("engine_options") is None
    assert [finding.what for finding in draft.findings()] == ["With use_cpu, ranks leave the cluster's GPUs alone."]
    draft.values["use_cpu"] = False
    assert draft.findings() == ()  # this machine's one CPU has no say
    draft.write()
    written = config.resolve({}, file=file, environ={})
    assert (written.engine, written.engine_options) == ("ray", ("strategy=SPREAD", "nodes=2"))
    assert (written.num_processes, written.use_cpu) == (16, False)
