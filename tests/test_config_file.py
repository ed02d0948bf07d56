"""Configuration files: Accelerate's keys, and writing."""

from __future__ import annotations

import os
import pathlib

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

from notebook_accel import config, config_file
from notebook_accel.errors import ConfigError

_ASKED = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "mixed_precision": "no",
    "use_cpu": False,
    "debug": False,
    "num_processes": 1,
}
_WRITTEN_BY_ACCELERATE = {"mixed_precision": "no", "num_processes": 1, "rdzv_backend": "static", "use_cpu": False}


def test_every_key_that_accelerate_writes_is_known(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "default_config.yaml"
    ClusterConfig(**_ASKED).to_yaml_file(str(file))
    written = config_file.read(file)
    assert len(written.values) > 10
    assert config.usable(written) == (_WRITTEN_BY_ACCELERATE, ())
    assert {"deepspeed_config", "fsdp_config", "tpu_name"} <= set(ClusterConfig.__dataclass_fields__)
    for key in ClusterConfig.__dataclass_fields__.keys() - {option.name for option in config.fields()}:
        assert config_file.is_harmless(key, None), key


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_what_is_written_is_read_by_accelerate_too(tmp_path: pathlib.Path, suffix: str) -> None:
    file = tmp_path / "folder" / f"config.{suffix}"
    config_file.write(file, {"distributed_type": "MULTI_CPU", "mixed_precision": "bf16", "num_processes": 2})
    theirs = load_config_from_file(str(file))
    assert (theirs.distributed_type.value, theirs.mixed_precision, theirs.num_processes) == ("MULTI_CPU", "bf16", 2)
    assert config.load(file) == {"mixed_precision": "bf16", "num_processes": 2}
    assert list(file.parent.iterdir()) == [file]


def test_two_numbers_with_a_colon_are_no_number(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("end_at: 11:30\ntimeout_s: 60.5\n")
    assert config.load(file) == {"end_at": "11:30", "timeout_s": 60.5}


def test_lines_are_those_of_the_file(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("# first\n\nuse_cpu: true\ntpu_env:\n  - a\n  - b\nname: x\n")
    read = config_file.read(file)
    assert read.lines == {"use_cpu": 3, "tpu_env": 4, "name": 7}
    assert yaml.safe_load(config_file.dump(read.values)) == read.values


@pytest.mark.parametrize("text", ["[", "- a list"])
def test_advice_about_a_file_can_be_typed(text: str, tmp_path: pathlib.Path) -> None:
    file = tmp_path / "my config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        config_file.read(file)
    assert refused.value.fix == f"mend it or delete it: rm '{file}'"


def test_folder_in_place_of_a_file_is_not_to_be_deleted(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"can't be read: it is a folder\.\nFix: name a file, with --config_file"):
        config_file.read(tmp_path)


def test_file_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a_file").touch()
    with pytest.raises(ConfigError, match=r"a_file/config.yaml can't be written: File exists"):
        config_file.write(tmp_path / "a_file" / "config.yaml", {})
    (tmp_path / "folder" / "config.yaml").mkdir(parents=True)
    with pytest.raises(ConfigError, match="can't be written: Is a directory"):
        config_file.write(tmp_path / "folder" / "config.yaml", {})
    assert os.listdir(tmp_path / "folder") == ["config.yaml"]


def test_a_link_stays_one(tmp_path: pathlib.Path) -> None:
    link, file = tmp_path / "config.yaml", tmp_path / "dotfiles" / "mine.yaml"
    file.parent.mkdir()
    file.touch()
    link.symlink_to(file)
    config_file.write(link, {"use_cpu": True})
    assert link.is_symlink()
    assert file.read_text() == "use_cpu: true\n"


def test_where_accelerate_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert config_file.accelerate_path() == pathlib.Path("/cache/huggingface/accelerate/default_config.yaml")
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert config_file.accelerate_path() == pathlib.Path.home() / "hf/accelerate/default_config.yaml"


def test_settings_of_the_compiler_that_accelerate_writes(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "default_config.yaml"
    switches = ("dynamo_use_dynamic", "dynamo_use_fullgraph", "dynamo_use_regional_compilation")
    compiler = {"dynamo_backend": "AOT_EAGER", "dynamo_mode": "default", **dict.fromkeys(switches, False)}
    ClusterConfig(**_ASKED, dynamo_config=compiler).to_yaml_file(str(file))
    assert config.load(file) == {**_WRITTEN_BY_ACCELERATE, "dynamo_backend": "aot_eager"}
    file.write_text(file.read_text().replace("dynamo_use_fullgraph: false", "dynamo_use_fullgraph: true"))
    with pytest.raises(
        ConfigError, match=r"line \d+: dynamo_use_fullgraph: True .* give the Accelerator a TorchDynamo"
    ):
        config.load(file)
    file.write_text("dynamo_config:\n  dynamo_backend: 'NO'\n")
    assert config.load(file) == {"dynamo_backend": "no"}
    file.write_text("dynamo_backend: INDUCTOR\n")
    assert config.load(file) == {"dynamo_backend": "inductor"}
