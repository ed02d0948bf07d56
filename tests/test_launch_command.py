"""``notebook-accel launch`` runs a script on every rank."""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import subprocess
import sys
import threading
import zipapp

import pytest
from accelerate.commands.launch import launch_command_parser

from notebook_accel import cli, config, launch_command
from notebook_accel.launching.kernel import local
from tests import kernels
from tests.launches import template  # noqa: F401 - ranks start at once where it is ready

_SCRIPT = """
import json, os, pathlib, signal, sys, time
from notebook_accel import Accelerator

def main():
    accelerator = Accelerator()
    rank = accelerator.process_index
    how, *rest = sys.argv[1:]
    if how == "raise" and rank == 1:
        raise ValueError("rank 1 gives up")
    if how == "exit" and rank == 1:
        sys.exit(-1 if "-1" in sys.argv else 5)
    if how == "die" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how != "train":
        try:
            if how == "sleep":
                pathlib.Path(rest[0]).touch()
            time.sleep(60)
        finally:
            print("cleaned up", flush=True)
    steps = accelerator.gradient_accumulation_steps
    state = accelerator.state
    plugin, backend = state.fsdp_plugin, state.dynamo_plugin.backend.value
    settings = [steps, backend, plugin.min_num_params, plugin.saves_whole]
    accelerator.print(json.dumps([sys.argv[0], rest, "get_ipython" in globals(), settings]))

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A training script in the current folder, without a configuration of the user's."""
    monkeypatch.setenv("NOTEBOOK_ACCEL_CONFIG_FILE", str(tmp_path / "config.yaml"))
    (tmp_path / "config.yaml").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "train_squares.py"
    path.write_text(_SCRIPT)
    return path


def launch(*arguments: object) -> int:
    return cli.main(["launch", "--num_processes", "2", "--use_cpu", *map(str, arguments)])


@pytest.mark.usefixtures("template")
@pytest.mark.parametrize("kind", ["file", "module", "folder", pytest.param("zip file", marks=pytest.mark.slow)])
def test_program_is_the_main_one_of_every_rank_and_has_the_settings_of_the_flags(
    script: pathlib.Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, archive = script.with_name("program"), script.with_name("program.pyz")
    folder.mkdir()
    (folder / "part.py").write_text(_SCRIPT)
    (folder / "__main__.py").write_text("import part\nif __name__ == '__main__': part.main()")
    zipapp.create_archive(folder, archive)
    line, name = {
        "file": (["train_squares.py"], script),
        "module": (["-m", "train_squares"], script),
        "folder": ([folder], folder),
        "zip file": ([archive], archive),
    }[kind]
    flags = "--gradient-accumulation-steps 3 --dynamo_backend=eager --use_fsdp --fsdp_version 2 --fsdp-min-num-params 7"
    flags += " --fsdp_auto_wrap_policy SIZE_BASED_WRAP --fsdp_options state_dict_type=full_state_dict"
    others = "--quiet --dynamo_mode=default --same-network --rdzv_backend static -t 3"
    assert launch(*flags.split(), *others.split(), *line, "train", "--epochs", "3") == 0
    shown = capsys.readouterr().out
    assert "Launching training on 2 CPUs." in shown
    assert f'0 │ ["{name}", ["--epochs", "3"], false, [3, "EAGER", 7, true]]\n' in shown


@pytest.mark.usefixtures("template")
@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("raise", 1, "ValueError: rank 1 gives up"),
        ("exit -1", 255, "SystemExit: -1"),
        ("die", 137, "killed by SIGKILL"),
    ],
)
def test_status_is_that_of_the_rank_that_failed_first(
    script: pathlib.Path, how: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(script, *how.split()) == status
    shown = capsys.readouterr().err
    assert said in shown and "rank 1 of 2" in shown
    assert "notebook_accel" + os.sep not in shown  # frames are the script's own


@pytest.mark.usefixtures("template")
@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGINT, "KeyboardInterrupt"), pytest.param(signal.SIGTERM, "SIGTERM", marks=pytest.mark.slow)],
)
def test_signal_ends_it_and_ranks_clean_up(
    script: pathlib.Path, number: signal.Signals, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    is_up = script.with_name("up")

    def interrupt() -> None:
        while not is_up.exists():
            if ended.wait(0.01):
                return
        os.kill(os.getpid(), number)

    ended = threading.Event()
    watcher = threading.Thread(target=interrupt)
    watcher.start()
    try:
        assert launch(script, "sleep", is_up) == 128 + number
    finally:
        ended.set()
        watcher.join()
    captured = capsys.readouterr()
    assert f"{said}: 'train_squares.py' was interrupted, and every rank has ended." in captured.err
    assert captured.out.count("cleaned up") >= 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_only_the_first_of_several_end_signals_interrupts() -> None:
    with launch_command.end_signals_as_interrupts() as received:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
    assert received.number == signal.SIGTERM


def test_interrupt_at_the_end_of_the_process_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.engine(), "close", lambda: signal.raise_signal(signal.SIGINT))
    local._close()


@pytest.mark.slow
def test_closed_pipe_ends_it(tmp_path: pathlib.Path, script: pathlib.Path) -> None:
    endless = tmp_path / "endless.py"
    endless.write_text("import time\nwhile True:\n    print('on and on', flush=True)\n    time.sleep(0.01)\n")
    command = [sys.executable, "-m", "notebook_accel", "launch", "--num_processes", "1", str(endless)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launched:
        assert launched.stdout is not None and launched.stderr is not None
        while "on and on" not in launched.stdout.readline():
            assert launched.poll() is None
        launched.stdout.close()  # as `| head -2` does
        said = launched.stderr.read()
    assert launched.returncode == 128 + signal.SIGPIPE
    assert said == "\nSIGPIPE: 'endless.py' was interrupted, and every rank has ended.\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.py"], "There is no file 'nothing.py' to launch."),
        (["-m", "nothing.at_all"], "There is no module 'nothing.at_all' to launch."),
        (["-m", "train_squares.py"], "There is no module 'train_squares.py' to launch."),
        (["-m", "failing.nothing"], "There is no module 'failing.nothing' to launch."),
        (["-m", ".train_squares"], "There is no module '.train_squares' to launch."),
        (["failing"], "There is no file 'failing' to launch."),
        (["--tpu", "train_squares.py"], "--tpu was asked for, and there is no TPU"),
        (["--num_machines", "2", "-n", "3", "train_squares.py"], "3 processes can't be shared out evenly among 2"),
        (["--num_machines", "2", "--machine_rank", "2", "train_squares.py"], "node_rank=2 is too high for num_nodes=2"),
        (["--main_process_ip", "10.0.0.1", "train_squares.py"], "master_addr='10.0.0.1' is about several nodes"),
        (["--gpu_ids", "0,1", "train_squares.py"], "--gpu_ids was asked for, and there is no GPU"),
        (["--multi_gpu", "train_squares.py"], "--multi_gpu was asked for, and there is no GPU"),
        (["--config_file", "none.yaml", "train_squares.py"], "There is no configuration file none.yaml."),
        (["--fsdp_min_num_params", "7", "train_squares.py"], "fsdp_options='min_num_params=7' would do nothing."),
    ],
)
def test_what_is_not_there_is_refused(
    script: pathlib.Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    package = script.with_name("failing")
    package.mkdir()
    (package / "__init__.py").write_text("raise ValueError('in the launcher')")
    assert launch(*arguments) == 1
    assert capsys.readouterr().err.startswith(said)


def test_flags_for_what_is_not_done_here_are_named_all_at_once(
    script: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--use_deepspeed --zero-stage 3 --dynamo_use_fullgraph --dynamo_mode default --vm a --vm b"
    line += " --parallelism_config_sp_size 2"
    assert launch(*line.split(), script, "train") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "--zero_stage 3, --use_deepspeed: DeepSpeed; --fsdp" in captured.err
    assert "--dynamo_use_fullgraph: settings of torch.compile; give the Accelerator a TorchDynamo" in captured.err
    assert "--vm a, --vm b: a TPU pod" in captured.err
    assert "--parallelism_config_sp_size 2: sequence parallelism" in captured.err
    assert "dynamo_mode" not in captured.err


def test_every_flag_of_accelerates_is_understood() -> None:
    ours = cli.make_parser()
    for action in launch_command_parser()._actions:
        value = ["7"] if action.nargs is None else []
        for flag in action.option_strings:
            if flag not in ("-h", "--help"):
                parsed, rest = ours.parse_known_args(["launch", flag, *value, "train.py"])
                assert (parsed.script, rest) == ("train.py", []), flag


def test_options_come_from_the_configuration_file(script: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.default_path().write_text("mixed_precision: fp16\n")
    assert launch(script, "train") == 1
    assert "mixed_precision='fp16' was asked for, and the ranks run on the CPU." in capsys.readouterr().err


@pytest.mark.parametrize("source", ["flag", "file", "variable"])
def test_machines_of_accelerates_flags_are_nodes(
    script: pathlib.Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = argparse.ArgumentParser()
    launch_command.add_arguments(parser)
    line = "--num_machines 2 --machine_rank 1 --main_process_ip 10.0.0.1 train.py"
    if source == "flag":
        line = f"--num_processes 4 {line}"
    elif source == "file":
        config.default_path().write_text("num_processes: 4")
    else:
        monkeypatch.setenv("NOTEBOOK_ACCEL_NUM_PROCESSES", "4")
    assert launch_command._options(parser.parse_args(line.split())) == config.LaunchConfig(
        num_nodes=2, node_rank=1, master_addr="10.0.0.1", num_processes=2
    )


def test_flags_divide_the_ranks(script: pathlib.Path) -> None:
    parser = argparse.ArgumentParser()
    launch_command.add_arguments(parser)
    line = "--use_parallelism_config --parallelism_config_tp_size 2 --parallelism_config_cp_size 1"
    line += " --parallelism_config_cp_comm_strategy alltoall train.py"
    assert launch_command._options(parser.parse_args(line.split())).parallelism_config_tp_size == 2


@pytest.mark.usefixtures("template")
def test_script_with_an_odd_name_and_settings_of_its_own_gets_those_of_the_flags(
    script: pathlib.Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_DYNAMO_BACKEND": "eager",
    }
    for name in settings:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # at the end of the test too
    odd = script.with_name("odd\nname.py")
    odd.write_text(
        "import os\n"
        f"own = {settings}\n"
        "print('hello', *[os.environ.setdefault(name, value) for name, value in own.items()])"
    )
    monkeypatch.setenv("NOTEBOOK_ACCEL_MIXED_PRECISION", "no")
    assert launch("--no-fsdp", odd) == 0
    shown = kernels.unfolded(capfd.readouterr().out)
    assert {f"{rank} │ hello no false eager" for rank in (0, 1)} <= set(shown)
