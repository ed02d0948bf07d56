"""Tests of loading the extension in homes of all kinds."""

from __future__ import annotations

import os
import pathlib
import pwd
import subprocess
import sys

import pytest

from notebook_accel import config, config_file
from notebook_accel.errors import ConfigError
from tests import kernels
from tests.kernel_ext.conftest import assert_ready, error, shown
from tests.kernel_ext.test_completion import offered
from tests.launches import prepare

# Becomes another program, without root's right to look into every folder (CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH).
_AS_AN_ORDINARY_USER = """
import ctypes, os, sys
for capability in (1, 2) if os.geteuid() == 0 else ():
    assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
_NOTEBOOK = """
import os, sys
from IPython.core.interactiveshell import InteractiveShell
home = os.environ["HOME"]
try: os.listdir(home); os.mkdir(home + "/new"); sys.exit("this home is an ordinary one")
except OSError: pass
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "notebook_accel")
shell.run_cell("%%distributed -n 2 --view none --out values\\nimport os\\nos.environ['RANK']").raise_error()
shell.run_cell("%distributed doctor").raise_error()
shell.run_cell("%distributed config").raise_error()
shell.run_cell("from notebook_accel import notebook_launcher").raise_error()
print("ranks", list(shell.user_ns["values"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0o000, None], ids=["unreadable", "missing"])
def test_home_that_cannot_be_used_keeps_nobody_from_training(mode: int | None, tmp_path: pathlib.Path) -> None:
    """Train with a root-squashed home, or that of `docker --user`. The processes really lack the right to read it."""
    home = tmp_path / "home"
    if mode is not None:
        home.mkdir()
        home.chmod(mode)
    own = ("NOTEBOOK_ACCEL_CONFIG_FILE", "XDG_CACHE_HOME", "HF_HOME", "IPYTHONDIR")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    try:
        run = subprocess.run(
            [sys.executable, "-c", _AS_AN_ORDINARY_USER, _NOTEBOOK],
            env={**environment, "HOME": str(home), "CUDA_VISIBLE_DEVICES": ""},
            cwd=pathlib.Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    finally:
        if mode is not None:
            home.chmod(0o700)
    assert "ranks ['0', '1']" in run.stdout and run.returncode == 0, run
    assert "refused: " not in run.stdout


def test_user_without_an_account_has_no_file_and_is_told_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Resolve options as under `docker --user 12345`, where nothing names a home folder; `pwd` is patched to say so."""

    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "NOTEBOOK_ACCEL_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(tmp_path)
    assert config.resolve({}, file=config.default_path()) == config.LaunchConfig()
    assert not config_file.accelerate_path().exists()
    with pytest.raises(ConfigError, match="this user has no home folder"):
        config_file.write(config.default_path(), {"use_cpu": True})
    assert list(tmp_path.iterdir()) == []


_OWN_SESSION = "get_ipython().magics_manager.magics['cell']['rank'].__self__.session"


# A session starts, is restarted, ends, and starts again; then the kernel makes a new template.
@pytest.mark.front_end
def test_session_from_start_to_stop_and_what_goes_with_the_extension(notebook: kernels.Kernel) -> None:
    assert "needs a session, and there is none" in error(notebook, "%%rank 0\n1")
    assert_ready(notebook.run("%distributed start -n 2 --use_cpu --name mine", 180))
    assert "(mine): running" in notebook.run("%distributed status").stdout
    notebook.run("%%distributed\nkept = 1")
    assert "No rank has died" in notebook.run("%distributed restart").stdout
    notebook.run(f"os.kill({_OWN_SESSION}.job.ranks[1].pid, 9)")
    said = error(notebook, "%%distributed\nkept")
    assert "rank 1 of 2 was killed by SIGKILL" in said and "%distributed restart" in said
    assert "Rank 1 has restarted" in notebook.run("%distributed restart").stdout
    assert shown(notebook, "%%distributed\n'kept' in globals()") == "rank 0: True\nrank 1: False"
    assert "rank 1 has no 'kept', perhaps since a restart: run the cell" in error(notebook, "%%distributed\nkept")
    assert "The session has ended" in notebook.run("%distributed stop --run mine").stdout
    assert shown(notebook, "%%distributed -n 1 --use_cpu\n'kept' in globals()") == "[False]"
    assert_ready(notebook.run("%distributed start -n 2 --use_cpu"))
    assert notebook.run("%unload_ext notebook_accel").status == "ok"
    assert notebook.descendants() == []
    assert "not found" in notebook.run("%distributed").stderr + notebook.run("%%distributed -n 1\n1").stderr
    assert "--num_processes" not in offered(notebook, "%%distributed --num")
    assert "status" not in offered(notebook, "%distributed st")
    notebook.run("def theirs(line, cell): pass\ntheirs.__module__ = 'nbdistributed.magic'")
    notebook.run("get_ipython().register_magic_function(theirs, 'cell', 'distributed')")
    loaded = notebook.run("%load_ext kernel_ext")  # its other name
    assert (loaded.status, "nbdistributed.magic" in loaded.stderr) == ("ok", True)
    assert "--num_processes" in offered(notebook, "%%distributed --num")
    assert notebook.run("%unload_ext kernel_ext").status == "ok"
    assert "--num_processes" not in offered(notebook, "%%distributed --num")
    prepare(notebook)  # it can be loaded again
    assert "--num_processes" in offered(notebook, "%%distributed --num")
