"""``notebook-accel demo``: the first example notebook, in JupyterLab, or in the terminal where there is no Lab.

``demo.ipynb`` is that notebook: a symbolic link in the repository, a file in an installed package.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import shlex
import shutil
import sys
from typing import NoReturn

from notebook_accel.errors import ConfigError

_NOTEBOOK = pathlib.Path(__file__).with_name("demo.ipynb")
_NAME = "01_train_on_every_device.ipynb"
_NEEDS = {"nbformat": "nbformat", "sklearn": "scikit-learn"}  # not among this package's own dependencies


def run(_: argparse.Namespace) -> NoReturn:
    """Replace this process by JupyterLab with a copy of the notebook in this folder, or by IPython, which runs it.

    Raises:
        ConfigError: A package is missing, or the notebook can't be copied.
    """
    missing = [package for module, package in _NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError("The demo needs packages that aren't installed.", fix=f"pip install {' '.join(missing)}")
    if importlib.util.find_spec("jupyterlab") is None:
        print("JupyterLab isn't installed here, so the notebook runs in this terminal, without the panel.")
        _become("IPython", str(_NOTEBOOK))
    copy = pathlib.Path(_NAME)
    if copy.exists():
        print(f"{copy} is in this folder already and stays as it is.")
    else:
        try:
            shutil.copyfile(_NOTEBOOK, copy)
        except OSError as error:
            raise ConfigError(f"{copy} can't be written: {error.strerror}.", fix="cd to a folder of yours") from None
    _become("jupyterlab", f"--LabApp.default_url=/lab/tree/{_NAME}")  # also in the address that it prints


def _become(*module: str) -> NoReturn:
    """Run a Python module in place of this process. Print the command first, since it takes flags of its own."""
    command = [sys.executable, "-m", *module]
    print(f"$ {shlex.join(command)}", flush=True)
    os.execv(sys.executable, command)
