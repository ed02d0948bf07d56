"""Environment variables, under the names that Accelerate documents."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from notebook_accel import environment
from notebook_accel.errors import ConfigError

__all__ = [
    "clear_environment",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "str_to_bool",
]


def patch_environment(**kwargs: object) -> contextlib.AbstractContextManager[None]:
    """A context with some variables set, and afterwards as they were: ``patch_environment(omp_num_threads=1)``.

    Args:
        kwargs: Values by the variables' names, which are taken in upper case.
    """
    return environment.patched({name.upper(): str(value) for name, value in kwargs.items()})


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """A context without any variables; afterwards they are as they were."""
    before = dict(os.environ)
    environment.become({})
    try:
        yield
    finally:
        environment.become(before)


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 for yes, true, t, y, on and 1, and 0 for their opposites, in any case.

    Args:
        value: The text.
        to_bool: ``True`` and ``False`` instead.

    Raises:
        ConfigError: It is neither.
    """
    if not environment.is_true(value) and not environment.is_false(value):
        raise ConfigError(
            f"{value!r} is neither yes nor no.", fix="yes, true, t, y, on or 1; no, false, f, n, off or 0"
        )
    return environment.is_true(value) if to_bool else int(environment.is_true(value))


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return whether a variable says yes; ``default`` if it isn't set."""
    return bool(str_to_bool(os.environ[key])) if key in os.environ else default


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """A variable's text; ``default`` if it isn't set."""
    return os.environ.get(key, default)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first number from 0 among some variables; ``default`` if none is set."""
    return next((int(os.environ[key]) for key in env_keys if int(os.environ.get(key, "-1")) >= 0), default)
