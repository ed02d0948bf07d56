"""The command line, as a user calls it."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import NoReturn

import pytest

import notebook_accel
from kernel_ext import commands
from notebook_accel import cli, config, demo_command
from notebook_accel.errors import NotebookAccelError
from notebook_accel.launching.kernel import launcher
from tests.processes import wait_until


@pytest.fixture(autouse=True)
def _no_configuration_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config.default_path().parent.mkdir(parents=True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_env_has_the_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["notebook-accel"] == notebook_accel.VERSION
    assert lines["torch"] == importlib.metadata.version("torch")
    assert lines["torch-xla"] in {"not installed", "2.9.0"}
    assert lines["devices"] == "1 CPU"
    assert lines["machine"].endswith(" GiB of memory")


@pytest.mark.usefixtures("state_home")  # without detached runs
def test_doctor_finds_nothing_against_a_launch_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--num_processes", "2"]) == 0
    assert capsys.readouterr().out == "Nothing speaks against a launch.\n"


@pytest.mark.parametrize(("said", "expected"), [
    ("engine: ray\nengine_options: [address=10.255.255.1:1]\n", "refused: "),
    ("max_restarts: 1\nnum_nodes: '2:4'\n", "refused: "),
    ("num_processes: 300\n", "refused: num_processes=300 is too many for one machine."),
    ("mixed_precision: fp16\n", "refused: mixed_precision='fp16' was asked for"),
    ("grace_s: long\n", "refused: The configuration file "),
    ("use_cpu: true\n", "Nothing speaks against a launch."),
])  # fmt: skip
def test_every_doctor_says_what_a_launch_would(
    said: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    config.default_path().write_text(said)
    status = cli.main(["doctor"])
    in_terminal = capsys.readouterr().out
    commands.run("doctor")
    assert capsys.readouterr().out == in_terminal
    assert in_terminal.startswith(expected) and status == int(expected.startswith("refused"))
    assert cli.main(["doctor", "--json"]) == status
    as_data = json.loads(capsys.readouterr().out)
    commands.run("doctor --json")
    assert json.loads(capsys.readouterr().out) == as_data
    assert as_data["is_refused"] == bool(status)
    assert all(finding["what"] in in_terminal for finding in as_data["findings"])
    if status:
        with pytest.raises(NotebookAccelError) as refused:
            launcher.launch_function(print, (), {}, config.resolve({}, file=config.default_path()))
        assert str(refused.value).splitlines()[0] in in_terminal


def test_doctor_finds_that_the_folder_is_deleted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    os.chdir("gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(["doctor", "--json"]) == 1
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert finding["what"].startswith("The kernel's working directory has been deleted")


def test_option_that_is_not_allowed_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "--num_processes", "two", __file__]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("num_processes='two' is not a whole number.\nFix: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage: notebook-accel [-h]"),
        (["launch"], "the following arguments are required: script\n"),
        (["doctor", "--gpus", "2"], "notebook-accel doctor: there is no option --gpus; is it --num_processes? "),
        (["launch", "--num_proceses=2", "train.py"], "there is no option --num_proceses=2; is it --num_processes? "),
    ],
)
def test_unknown_command_line_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("program", [
    [str(pathlib.Path(sys.executable).with_name("notebook-accel"))],
    [sys.executable, "-m", "notebook_accel"],
], ids=["console script", "package"])  # fmt: skip
def test_installed_program(program: list[str]) -> None:
    run = subprocess.run([*program, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == f"notebook-accel {notebook_accel.VERSION}\n"


def test_closed_pipe_is_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "notebook_accel", "env"]
        run = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    finally:
        os.close(writing)
    assert (run.returncode, run.stderr) == (128 + signal.SIGPIPE, "")


def _in_shell(line: str, folder: pathlib.Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of a shell, in which ``notebook_accel`` is the command, in a folder."""
    command = ["sh", "-c", f'notebook_accel() {{ "$0" -m notebook_accel "$@"; }}; {line}', sys.executable]
    given = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=given, cwd=folder, check=False)


@pytest.mark.parametrize("command", ["env", pytest.param("launch script.py", marks=pytest.mark.slow)])
def test_closed_streams_are_no_error(command: str, state_home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text("import pathlib; pathlib.Path('ran').touch(); print('hello')")
    run = _in_shell(f"notebook_accel {command} <&- >&-", tmp_path)
    assert run.returncode == 0 and "Error" not in run.stderr
    assert (tmp_path / "ran").exists() == command.startswith("launch")


def test_full_disk_is_one_sentence(tmp_path: pathlib.Path) -> None:
    run = _in_shell("notebook_accel env > /dev/full", tmp_path)
    assert (run.returncode, run.stderr) == (1, "The output can't be written: No space left on device.\n")


@pytest.mark.slow
def test_output_without_the_prefixs_character_shows_the_lines_all_the_same(tmp_path: pathlib.Path) -> None:
    (tmp_path / "script.py").write_text("print('hello')")
    run = _in_shell("notebook_accel launch --use_cpu script.py", tmp_path, PYTHONIOENCODING="ascii")
    assert run.returncode == 0 and "Error" not in run.stderr
    assert "0 ? hello" in run.stdout.splitlines()


def test_config_without_an_input_writes_nothing(tmp_path: pathlib.Path) -> None:
    run = _in_shell("notebook_accel config <&-", tmp_path)
    assert run.returncode == 1
    assert run.stderr.startswith("Nobody is here to answer, so nothing was written.\nFix: ")
    assert not config.default_path().exists()


_NOTEBOOK = pathlib.Path(__file__).parents[1] / "example_notebooks" / "01_train_on_every_device.ipynb"


def _without(module: str, folder: pathlib.Path) -> dict[str, str]:
    """Return variables with which a new process doesn't find a module."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules[{module!r}] = None\n")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize("has_lab", [False, True])
def test_demo_runs_the_notebook_in_a_terminal_or_in_lab_where_a_changed_copy_stays(
    has_lab: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    if has_lab:
        (here / _NOTEBOOK.name).write_text("{}")
    else:
        monkeypatch.setitem(sys.modules, "jupyterlab", None)

    def become(*command: str) -> NoReturn:
        print(*command, sep="\n")
        sys.exit()

    monkeypatch.setattr(demo_command, "_become", become)  # the README's first command runs it
    with pytest.raises(SystemExit):
        cli.main(["demo"])
    said, module, argument = capsys.readouterr().out.splitlines()
    if has_lab:
        assert said == f"{_NOTEBOOK.name} is in this folder already and stays as it is."
        assert (module, (here / _NOTEBOOK.name).read_text()) == ("jupyterlab", "{}")
    else:
        assert said.startswith("JupyterLab isn't installed here, so the notebook runs in this terminal")
        assert module == "IPython" and pathlib.Path(argument).samefile(_NOTEBOOK)
        assert list(here.iterdir()) == []


@pytest.mark.slow
def test_demo_opens_a_copy_of_the_notebook_in_lab(tmp_path: pathlib.Path) -> None:
    copy = tmp_path / _NOTEBOOK.name
    settings = {"open_browser": False, "allow_root": True, "port": 0}
    (tmp_path / "jupyter_server_config.json").write_text(json.dumps({"ServerApp": settings}))
    places = ("HOME", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_WORKSPACES_DIR")
    log = tmp_path / "log"
    with log.open("wb") as output:
        lab = subprocess.Popen(
            [sys.executable, "-m", "notebook_accel", "demo"], cwd=tmp_path, stdout=output, stderr=output,
            env={**os.environ, **dict.fromkeys(places, str(tmp_path))},
        )  # fmt: skip
    try:
        wait_until(lambda: f"/lab/tree/{copy.name}?token=" in log.read_text(), "Lab has an address", 60)
        assert lab.poll() is None
    finally:
        lab.kill()
        lab.wait()
    assert copy.read_text() == _NOTEBOOK.read_text()


def test_demo_names_the_packages_that_it_lacks(tmp_path: pathlib.Path) -> None:
    run = _in_shell("notebook_accel demo", tmp_path, **_without("sklearn", tmp_path))
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == "The demo needs packages that aren't installed.\nFix: pip install scikit-learn\n"


def _answer(monkeypatch: pytest.MonkeyPatch, answers: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answers))


def test_config_asks_writes_and_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    file = config.default_path()
    others = "\n" * (len(config.fields()) - 5)  # Enter keeps the value
    _answer(monkeypatch, f"two\n2\nint8\nbf16\n\n\n\ny\n{others}\n")
    assert cli.main(["config"]) == 0
    shown = capsys.readouterr().out
    assert "no GPU: ranks run on the CPU" in shown
    assert "num_processes='two' is not a whole number." in shown
    assert "mixed_precision='int8' is not known." in shown
    assert "fp16 needs a GPU.\nmixed_precision (no, bf16) [no]: " in shown
    for option in config.fields():
        assert option.help in shown
    assert "  + num_processes: 2\n" in shown
    assert shown.endswith(f"Written: {file}\n")
    assert config.load(file) == {"num_processes": 2, "mixed_precision": "bf16", "use_cpu": True}


@pytest.mark.parametrize(("answers", "asked", "written"), [
    ("2\nbf16\n4\n\n\n\n\n", 5, {"num_processes": 2, "mixed_precision": "bf16", "gradient_accumulation_steps": 4}),
    ("2\n\n\n\n3\n1\nnode0\n\n\n", 7, {"num_processes": 2, "num_nodes": 3, "node_rank": 1, "master_addr": "node0"}),
], ids=["one node", "several nodes"])  # fmt: skip
def test_config_asks_for_what_is_usual_and_offers_the_rest_once(
    answers: str, asked: int, written: dict[str, object], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path,
) -> None:  # fmt: skip
    _answer(monkeypatch, answers)
    assert cli.main(["config", "--log_dir", "/logs", "--grace_s", "5"]) == 0
    shown = capsys.readouterr().out
    assert sys.stdin.read() == ""
    assert sum(f"{option.help}\n" in shown for option in config.fields()) == asked <= 8
    others = len(config.fields()) - asked - 2  # flags count as answers
    assert shown.count(f"There are {others} more options") == shown.count("Ask for them too? [y/N] ") == 1
    basic = {"mixed_precision": "no", "use_cpu": True, "log_dir": "/logs", "grace_s": 5.0}
    assert config.load(config.default_path()) == {**basic, **written}


def test_config_offers_accelerates_file_and_asks_before_it_replaces_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    file = config.default_path()
    file.write_text("num_processes: 1\n")
    theirs = tmp_path / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir()
    theirs.write_text("num_processes: 4\ndeepspeed_config:\n  zero_stage: 3\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    keep = "\n" * 6  # the usual options, and the offer of the others
    for source, answer, status in (("n\ny\n", "\n", 1), ("n\ny\n", "y\n", 0)):
        _answer(monkeypatch, source + keep + answer)
        assert cli.main(["config"]) == status
        shown = capsys.readouterr().out
        assert f"Start from Accelerate's file instead: {theirs}?" in shown
        assert "not taken over: line 2: deepspeed_config asks for DeepSpeed" in shown
        assert "- num_processes: 1\n  + num_processes: 4\n" in shown
        assert config.load(file)["num_processes"] == (1 if status else 4)


def test_config_without_questions_replaces_nothing_unless_told_to(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "other" / "config.yaml"
    line = ["config", "--default", "--config_file", str(file)]
    assert cli.main([*line, "--mixed_precision", "bf16"]) == 0
    assert config.load(file)["mixed_precision"] == "bf16"
    assert cli.main([*line, "--mixed_precision", "no"]) == 1
    assert config.load(file)["mixed_precision"] == "bf16"
    assert "There is a configuration file already" in capsys.readouterr().err
    assert cli.main([*line, "--mixed_precision", "no", "--overwrite"]) == 0
    assert config.load(file)["mixed_precision"] == "no"


def test_config_is_left_by_an_interrupt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: signal.raise_signal(signal.SIGINT))
    assert cli.main(["config"]) == 130
    assert capsys.readouterr().err == "\nInterrupted.\n"
    assert not config.default_path().exists()


def test_config_where_nobody_answers_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    _answer(monkeypatch, "2\n")
    assert cli.main(["config"]) == 1
    assert "Nobody is here to answer, so nothing was written." in capsys.readouterr().err
    assert not config.default_path().exists()
