"""The public names, and the modules that importing them loads."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

import notebook_accel

# Each may import as much as the ones before it.
_IMPORT_NO_TORCH_AND_NO_IPYTHON = [
    "import notebook_accel",
    "notebook_accel.report(loss=1)",
    "notebook_accel.LaunchConfig, notebook_accel.RankFailedError, dir(notebook_accel)",
    "from notebook_accel import notebook_launcher, Job, Results",
    "from notebook_accel import config_widget; assert 'notebook-accel config\\n' in str(config_widget())",
    "from notebook_accel import write_basic_config; write_basic_config(save_location=sys.argv[1])",
    "import notebook_accel.cli",
    "import notebook_accel.launching.agent.agent",
    "from notebook_accel.launching.kernel import devices, pjrt, preflight",
    "devices.visible_gpus()",
    "preflight.check(notebook_accel.LaunchConfig())",
    "preflight.check_fork()",
    "os.environ['PJRT_DEVICE'] = 'CPU'; pjrt.find_platform()",
    "from notebook_accel.payload import serialization; serialization.pickle_by_value([1], roots={})",
]
_IMPORT_NO_TORCH = [
    "import kernel_ext.magics, kernel_ext.panel",
    "assert kernel_ext.panel.open_view(None) is None",  # outside a kernel there is none
]
_CODE = """
import os, sys
heavy = {"torch", "torch_xla", "jax", "numpy", "IPython", "ipykernel", "ipywidgets"}
for statements, allowed in (%r, set()), (%r, {"numpy", "IPython"}):
    for statement in statements:
        exec(statement)
        if found := (heavy - allowed) & sys.modules.keys():
            sys.exit(f"{statement} has imported {found}")
"""


def test_neither_torch_nor_ipython_is_imported(tmp_path: pathlib.Path) -> None:
    code = _CODE % (_IMPORT_NO_TORCH_AND_NO_IPYTHON, _IMPORT_NO_TORCH)
    command = [sys.executable, "-c", code, str(tmp_path / "config.yaml")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_every_public_name_is_there() -> None:
    assert sorted(notebook_accel.__all__) == notebook_accel.__all__
    assert set(notebook_accel.__all__) == {*notebook_accel._HOME, "config_widget"}
    for name in notebook_accel.__all__:
        assert getattr(notebook_accel, name).__module__.startswith("notebook_accel")
    assert set(notebook_accel.__all__) <= set(dir(notebook_accel))


def test_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="module 'notebook_accel' has no attribute 'Acelerator'"):
        _ = notebook_accel.Acelerator
    with pytest.raises(ImportError, match="cannot import name 'Acelerator'"):
        from notebook_accel import Acelerator  # noqa: F401  the import is what is tested
