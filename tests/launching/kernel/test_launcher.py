"""The arguments that ``notebook_launcher`` refuses before it starts anything, and its signature."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import pytest

from notebook_accel import config, debug_launcher, notebook_launcher
from notebook_accel.errors import ConfigError, PayloadError, PreflightError
from notebook_accel.launching.kernel import local
from tests import processes


def train() -> None:
    """Never runs here."""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"start_method": "forkserver"}, "start_method='forkserver'"),
        ({"start_method": "inline", "background": True}, "can't go on in the background"),
        ({"use_port": "http"}, "'http'"),
        ({"num_nodes": 0}, "num_nodes=0 can't be used"),
        ({"num_nodes": "2:4", "rdzv_backend": "c10d"}, "num_nodes='2:4' is not a whole number"),
        ({"num_nodes": 2, "node_rank": 2}, "node_rank=2 is too high for num_nodes=2"),
        ({"num_nodes": 2, "rdzv_endpoint": "10.0.0.1:http"}, "rdzv_endpoint='10.0.0.1:http' has no port"),
        ({"num_nodes": 2, "rdzv_endpoint": "[::1]:0"}, "has no port where other nodes could find this one"),
        ({"num_nodes": 2, "use_port": 0}, "main_process_port=0 means any free port, and several nodes have to know it"),
        ({"num_nodes": 2, "rdzv_conf": {"timeout": "inf"}}, "'timeout=inf', which isn't a number above 0 and up to"),
        ({"rdzv_conf": ["timeout=3"]}, "is list, not a dictionary"),
        ({"engine_options": {"a": object()}}, "engine_options can't be written as text"),
        ({"use_port": "²"}, "'²'"),
        ({"num_nodes": 2, "rdzv_conf": {"tiemout": 3}}, "rdzv_conf has 'tiemout=3', which static doesn't know"),
        (
            {"num_nodes": 2, "rdzv_backend": "c10d", "rdzv_conf": {"store_type": "file"}},
            "'store_type=file', which c10d",
        ),
        ({"num_nodes": 2, "rdzv_conf": {"timeout": "long"}}, "rdzv_conf has 'timeout=long', which isn't a number"),
        ({"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:http"}, "rdzv_endpoint='localhost:http' has no port"),
        ({"rdzv_endpoint": "localhost:29500"}, "rdzv_endpoint='localhost:29500' is about several nodes"),
        ({"node_rank": 1}, "node_rank=1 is about several nodes, and num_nodes is 1"),
        ({"max_restarts": -1}, "max_restarts=-1 can't be used: it has to be >= 0"),
        ({"monitor_interval": 0}, "monitor_interval=0 can't be used: it has to be > 0"),
        ({"rdzv_backend": "etcd"}, "rdzv_backend='etcd' is not known"),
        ({"master_addr": "10.0.0.1"}, "master_addr='10.0.0.1' is about several nodes, and num_nodes is 1"),
        ({"log_line_prefix_template": "[$rang]"}, "log_line_prefix_template='[$rang]'"),
    ],
)
def test_option_that_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    before = processes.children(os.getpid())
    with pytest.raises(ConfigError) as caught:
        notebook_launcher(train, **options)
    assert said in caught.value.what
    assert caught.value.fix
    assert set(processes.children(os.getpid())) <= set(before)


@pytest.mark.usefixtures("engine")
def test_settings_of_sharding_can_be_lists() -> None:
    options = {"transformer_layer_cls_to_wrap": ["A", "B"], "min_num_params": None}
    found = notebook_launcher(
        os.getenv, ("FSDP_TRANSFORMER_CLS_TO_WRAP",), num_processes=1, fsdp=True, fsdp_options=options, use_cpu=True
    )
    assert found == ["A,B"]


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match="the function itself"):
        notebook_launcher(train())  # type: ignore[func-returns-value, arg-type]  # the mistake that people make


async def train_in_a_loop() -> None:
    """Stand for a training function that a notebook's author would await."""


def train_in_turns() -> Iterator[float]:
    yield 0.5


@pytest.mark.parametrize(("function", "fix"), [(train_in_a_loop, "asyncio.run"), (train_in_turns, "return the values")])
def test_function_of_which_a_call_runs_nothing_is_refused(function: Callable[[], Any], fix: str) -> None:
    with pytest.raises(ConfigError, match="a call alone runs nothing of it") as caught:
        notebook_launcher(function, num_processes=2, use_cpu=True)
    assert fix in caught.value.fix


@pytest.mark.parametrize("args", ["no", 42])
def test_arguments_without_their_comma_are_refused(args: Any) -> None:
    with pytest.raises(ConfigError, match="the comma makes it a tuple"):
        notebook_launcher(train, args=args)


def test_preflight_refuses_before_anything_is_pickled() -> None:
    with pytest.raises(PreflightError, match="the ranks run on the CPU"):
        notebook_launcher(train, (threading.Lock(),), num_processes=2, mixed_precision="fp16", use_cpu=True)


def test_argument_that_cannot_be_sent_is_named() -> None:
    before = processes.children(os.getpid())
    with pytest.raises(PayloadError, match=r"argument 1 -> item 'lock'"):
        notebook_launcher(train, (1, {"lock": threading.Lock()}), num_processes=2, use_cpu=True)
    assert set(processes.children(os.getpid())) <= set(before)


def test_parameters_are_accelerates_in_their_order_and_ours_by_keyword() -> None:
    theirs = list(inspect.signature(accelerate.notebook_launcher).parameters)
    parameters = inspect.signature(notebook_launcher).parameters
    assert list(parameters)[: len(theirs)] == theirs
    ours = list(parameters.values())[len(theirs) :]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in ours)
    assert {"kwargs", "background", "start_method", "allow_initialized_cuda", "timeout_s"} <= {p.name for p in ours}


def test_notebook_launcher_takes_every_option() -> None:
    renamed = {"main_process_port": "use_port"}
    options = {renamed.get(option.name, option.name) for option in config.fields()}
    assert options <= inspect.signature(notebook_launcher).parameters.keys()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("num_process", "Did you mean 'num_processes'?"),
        ("nproc_per_node", "Did you mean 'num_processes'?"),
        ("main_process_port", "Did you mean 'use_port'?"),
        ("epochs", "The function's own arguments go into kwargs={'epochs': ...}."),
    ],
)
def test_unknown_argument_suggests_a_known_one(name: str, advice: str) -> None:
    with pytest.raises(TypeError) as caught:
        notebook_launcher(len, **{name: 2})  # type: ignore[arg-type]
    assert str(caught.value) == f"notebook_launcher() got an unexpected keyword argument {name!r}. {advice}"


def place(text: str) -> tuple[str, str, str, str]:
    names = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    return (text, *(os.environ[name] for name in names))


def test_debug_launcher_runs_two_ranks_without_a_gpu(engine: local.LocalEngine) -> None:
    assert list(debug_launcher(place, args=("a",))) == [("a", "0", "2", ""), ("a", "1", "2", "")]


def test_debug_launcher_refuses_what_notebook_launcher_refuses() -> None:
    with pytest.raises(ConfigError, match="num_processes=0"):
        debug_launcher(place, num_processes=0)
