"""A rank's place, and environment variables."""

from __future__ import annotations

import os
import socket

import pytest

from notebook_accel import environment
from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError


def test_place_survives_its_variables() -> None:
    place = RankPlace(rank=3, world_size=8, local_rank=1, local_world_size=2, master_addr="::1", master_port=29500)
    assert RankPlace.from_environment(place.variables()) == place


def test_without_variables_there_is_one_rank() -> None:
    assert RankPlace.from_environment({}) == RankPlace()
    assert RankPlace.from_environment({"RANK": "", "WORLD_SIZE": ""}) == RankPlace()


@pytest.mark.parametrize(("environ", "complaint"), [
    ({"RANK": "one"}, "RANK is 'one', which isn't a whole number"),
    ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE is 2"),
    ({"RANK": "-1"}, "RANK is -1"),
])  # fmt: skip
def test_place_that_can_not_be(environ: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        RankPlace.from_environment(environ)
    assert "unset" in caught.value.fix


@pytest.mark.parametrize(
    ("texts", "is_true", "is_false"),
    [
        (["1", "true", "True", "YES", "y", "on", " on "], True, False),
        (["0", "false", "NO", "n", "off"], False, True),
        (["", "2", "banana"], False, False),
    ],
)
def test_text_that_means_yes_no_or_neither(texts: list[str], is_true: bool, is_false: bool) -> None:
    for text in texts:
        assert (environment.is_true(text), environment.is_false(text)) == (is_true, is_false), text


def test_variables_that_are_read_at_import() -> None:
    environ = {
        "OMP_NUM_THREADS": "2", "LD_LIBRARY_PATH": "/lib", "PYTHONPATH": "/x", "HF_HOME": "/hf",
        "CUDA_VISIBLE_DEVICES": "0", "CUDA_HOME": "/cuda", "HOME": "/root", "RANK": "0",
    }  # fmt: skip
    assert set(environment.import_time_variables(environ)) == {
        "OMP_NUM_THREADS", "LD_LIBRARY_PATH", "PYTHONPATH", "HF_HOME", "CUDA_HOME",
    }  # fmt: skip


def test_patched_puts_back_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_SET", "before")
    monkeypatch.setenv("TEST_UNSET", "before")
    monkeypatch.delenv("TEST_NEW", raising=False)
    names = ("TEST_SET", "TEST_UNSET", "TEST_NEW")
    with pytest.raises(KeyError), environment.patched({"TEST_SET": "inside", "TEST_UNSET": None, "TEST_NEW": "inside"}):
        assert [os.environ.get(name) for name in names] == ["inside", None, "inside"]
        raise KeyError
    assert [os.environ.get(name) for name in names] == ["before", "before", None]


@pytest.mark.parametrize("name", ["NOTEBOOK_ACCEL_DEBUG", "ACCELERATE_DEBUG_MODE"])
@pytest.mark.parametrize(("text", "is_on"), [("yes", True), ("1", True), ("on", True), ("no", False), ("", False)])
def test_debug_mode(name: str, text: str, is_on: bool) -> None:
    assert environment.is_debugging({name: text}) == is_on


def test_switch_that_is_neither_on_nor_off_is_refused() -> None:
    assert [environment.flag("A", {"A": text}) for text in ("Yes", "off", "")] == [True, False, None]
    with pytest.raises(ConfigError, match="The environment variable NOTEBOOK_ACCEL_DEBUG is 'maybe'"):
        environment.is_debugging({"NOTEBOOK_ACCEL_DEBUG": "maybe"})


def test_options_of_the_training_are_equal_if_they_mean_the_same() -> None:
    here = {"FSDP_OFFLOAD_PARAMS": "True", "FSDP_VERSION": "", "ACCELERATE_USE_FSDP": "false", "HOME": "/here"}
    there = {"FSDP_OFFLOAD_PARAMS": "true", "ACCELERATE_MIXED_PRECISION": "no", "HOME": "/there"}
    assert environment.training_options(here) == environment.training_options(there)
    there["FSDP_TRANSFORMER_CLS_TO_WRAP"] = "Block"
    assert environment.training_options(there)["fsdp_transformer_cls_to_wrap"] == "Block"


def test_become_leaves_exactly_these_variables() -> None:
    before = dict(os.environ)
    try:
        environment.become({**before, "NEW": "1", "PATH": "/nowhere"})
        assert dict(os.environ) == {**before, "NEW": "1", "PATH": "/nowhere"}
    finally:
        environment.become(before)
    assert dict(os.environ) == before


def test_loopback_leads_to_this_machine() -> None:
    for host in ("127.0.0.1", "127.0.0.2", "localhost"):
        address = environment.address_towards(host, 29500)
        assert environment.interface_of(address) == "lo"


def test_each_address_has_its_interface_and_loopback_comes_last() -> None:
    *others, last = environment.own_addresses()
    assert last == "127.0.0.1"
    names = {name for _, name in socket.if_nameindex()}
    for address in others:
        assert environment.interface_of(address) in names - {"lo"}
        assert environment.address_towards(address, 29500) == address


def test_where_no_way_leads_there_is_no_interface() -> None:
    assert environment.interface_of("203.0.113.7") == ""
    assert environment.address_towards("no-such-host.invalid", 29500) == "127.0.0.1"
