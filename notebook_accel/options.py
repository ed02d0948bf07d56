"""From ``LaunchConfig`` to flags, so that no option is written a second time.

The magics and the command line add these to their own parsers.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from typing import Any

from notebook_accel import config

__all__ = ["add_flags", "closest", "given"]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each option. A flag that isn't given leaves ``None``, so that other sources can decide."""
    for option in config.fields():
        flags = [f"--{option.name}", *_SHORT.get(option.name, ())]
        text = option.help if option.default in (None, "", ()) else f"{option.help} Default: {option.default}."
        text = text.replace("%", "%%")  # argparse formats it
        if option.kind is bool:
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, default=None, help=text)
        else:
            # Text that is no value of the type goes on to LaunchConfig as it is: complaints come from one place.
            parser.add_argument(*flags, default=None, metavar=_metavar(option), type=_reader(option), help=text)


_SHORT = {"num_processes": ("-n",)}


def _metavar(option: config.Option) -> str:
    if option.kind is tuple:
        return "NAME,..."
    return "{" + ",".join(option.choices) + "}" if option.choices else option.kind.__name__.upper()


def _reader(option: config.Option) -> Any:
    def read(text: str) -> Any:
        return config.from_text(option, text)

    return read


def given(namespace: argparse.Namespace) -> dict[str, Any]:
    """The options that were given as flags."""
    return {
        option.name: value for option in config.fields() if (value := getattr(namespace, option.name, None)) is not None
    }


def closest(word: str, flags: Iterable[str]) -> str:
    """The flag that somebody may have meant by one that isn't there; empty if there is none.

    One of which it is a part, such as ``--use_cpu`` for Accelerate's ``--cpu``, is closer than one of the same length.
    """
    name = word.partition("=")[0]
    flags = list(flags)
    longer = [flag for flag in flags if name.strip("-") in flag.strip("-").split("_")]
    return next(iter([*longer, *difflib.get_close_matches(name, flags)]), "")
