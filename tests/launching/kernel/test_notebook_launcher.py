from __future__ import annotations

import os

import pytest

from notebook_accel import debug_launcher
from notebook_accel.errors import ConfigError
from notebook_accel.launching.kernel import local


def place(text: str) -> tuple[str, str, str, str]:
    names = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    return (text, *(os.environ[name] for name in names))


def test_two_ranks_without_a_gpu(engine: local.LocalEngine) -> None:
    assert list(debug_launcher(place, args=("a",))) == [("a", "0", "2", ""), ("a", "1", "2", "")]


def test_it_refuses_what_notebook_launcher_refuses() -> None:
    with pytest.raises(ConfigError, match="num_processes=0"):
        debug_launcher(place, num_processes=0)
