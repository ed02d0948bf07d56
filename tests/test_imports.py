"""The public names, and the modules that importing them loads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import notebook_accel


def _modules_after(code: str) -> set[str]:
    """Return the modules that a fresh Python has imported after running the code."""
    printing = "import json, sys; sys.stdout.write(json.dumps(sorted(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\n{printing}"], capture_output=True, text=True, timeout=60, check=True
    )
    return set(json.loads(run.stdout))


@pytest.mark.parametrize("code", [
    "import notebook_accel",
    "import notebook_accel; dir(notebook_accel); notebook_accel.report(loss=1)",
    "import notebook_accel; notebook_accel.LaunchConfig, notebook_accel.RankFailedError",
    "from notebook_accel import notebook_launcher, Job, Results",
    "from notebook_accel import config_widget; config_widget()",
    "import notebook_accel.cli",
    "import notebook_accel.launching.agent.agent",
])  # fmt: skip
def test_neither_torch_nor_ipython_is_imported(code: str) -> None:
    modules = _modules_after(code)
    assert "notebook_accel" in modules
    assert not modules & {"torch", "IPython", "ipykernel", "ipywidgets", "numpy"}


@pytest.mark.parametrize("name", ["kernel_ext", "kernel_ext.magics", "kernel_ext.panel"])
def test_extension_imports_no_torch(name: str) -> None:
    modules = _modules_after(f"import {name}")
    assert name in modules
    assert "torch" not in modules


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
