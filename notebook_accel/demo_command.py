"""``notebook-accel demo``: the first example notebook, in JupyterLab, or in the terminal where there is no Lab.

``demo.ipynb`` is that notebook: a symbolic link in the repository, a file in an installed package.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import shlex
import shutil
import subprocess
import sys

from notebook_accel.errors import ConfigError

_NOTEBOOK = pathlib.Path(__file__).with_name("demo.ipynb")
_NAME = "01_train_on_every_device.ipynb"
_NEEDS = {"nbformat": "nbformat", "sklearn": "scikit-learn"}  # not among this package's own dependencies


def run(_: argparse.Namespace) -> int:
    """Open or run the notebook. Return the exit status of JupyterLab or IPython.

    Raises:
        ConfigError: A package is missing, or the notebook can't be copied into this folder.
    """
    missing = [package for module, package in _NEEDS.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError("The demo needs packages that aren't installed.", fix=f"pip install {' '.join(missing)}")
    if importlib.util.find_spec("jupyterlab") is None:
        print("JupyterLab isn't installed here, so the notebook runs in this terminal, without the panel.")
        return _call("IPython", str(_NOTEBOOK))
    copy = pathlib.Path(_NAME)
    if copy.exists():
        print(f"{copy} is in this folder already and stays as it is.")
    else:
        try:
            shutil.copyfile(_NOTEBOOK, copy)
        except OSError as error:
            raise ConfigError(f"{copy} can't be written: {error.strerror}.", fix="cd to a folder of yours") from None
    return _call("jupyterlab", str(copy))


def _call(*module: str) -> int:
    """Run a Python module in the terminal, after printing its command, to which flags of its own can be added."""
    command = [sys.executable, "-m", *module]
    print(f"$ {shlex.join(command)}", flush=True)
    return subprocess.run(command, check=False).returncode
