"""Functions that set and read environment variables."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator

import torch

from notebook_accel import environment
from notebook_accel.errors import ConfigError

__all__ = [
    "are_libraries_initialized",
    "clear_environment",
    "get_current_device_type",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "str_to_bool",
]


def patch_environment(**kwargs: object) -> contextlib.AbstractContextManager[None]:
    """Return a context that sets variables and restores them afterwards: ``patch_environment(omp_num_threads=1)``.

    Args:
        kwargs: Values by the variables' names, which are converted to upper case.
    """
    return environment.patched({name.upper(): str(value) for name, value in kwargs.items()})


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Return a context that removes all variables and restores them afterwards."""
    before = dict(os.environ)
    environment.become({})
    try:
        yield
    finally:
        environment.become(before)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return the given modules that this process has imported."""
    return [name for name in library_names if name in sys.modules]


def get_current_device_type() -> tuple[str, str]:
    """Return the type of the devices that ranks would train on here, as torch and as ``DistributedType`` call it."""
    return ("cuda", "MULTI_GPU") if torch.cuda.is_available() else ("cpu", "MULTI_CPU")


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for yes, true, t, y, on and 1, and 0 for their opposites, in upper or lower case.

    Args:
        value: The text.
        to_bool: Return ``True`` and ``False`` instead.

    Raises:
        ConfigError: ``value`` is another text.
    """
    if not environment.is_flag(value):
        raise ConfigError(
            f"{value!r} is neither yes nor no.", fix="yes, true, t, y, on or 1; no, false, f, n, off or 0"
        )
    return environment.is_true(value) if to_bool else int(environment.is_true(value))


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return a variable as a flag; ``default`` if it isn't set."""
    return bool(str_to_bool(os.environ[key])) if key in os.environ else default


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return a variable's text; ``default`` if it isn't set."""
    return os.environ.get(key, default)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first variable that holds a number from 0; ``default`` if there is none."""
    return next((int(os.environ[key]) for key in env_keys if int(os.environ.get(key, "-1")) >= 0), default)
