"""Runs the test programs that Accelerate's package brings for several processes, with their import lines renamed.

They check with assertions of their own that collectives, loaders, accumulation and random numbers do what Accelerate
documents. Models and datasets still come from ``accelerate.test_utils``.
"""

from __future__ import annotations

import importlib.util
import pathlib
import re
import types

import pytest

from notebook_accel import notebook_launcher

_IMPORT = re.compile(r"^(\s*)(from|import) accelerate(?!\.test_utils)", re.MULTILINE)
_SAME_TENSORS = "def are_the_same_tensors(tensor):\n    return len(gather(tensor[None]).unique(dim=0)) == 1\n\n\n"
# Lines that are replaced in a program, by its name.
_REPLACED: dict[str, dict[str, str]] = {
    "test_script": {
        # Accelerate's own function gathers with Accelerate's own state.
        "RegressionModel, are_the_same_tensors": "RegressionModel",
        "def main():": f"{_SAME_TENSORS}def main():",
        # It expects an attribute of a state that was reset to be missing.
        "        test_reinstantiated_state()\n": "        pass\n",
    },
    "test_distributed_data_loop": {
        # It expects a warning where even_batches can be changed here, for streams.
        "    test_join_raises_warning_for_iterable_when_overriding_even_batches()\n": "",
        # It pretends that another kind of ranks is there.
        "    accelerator.state.distributed_type = DistributedType.FSDP\n": "",
        "    test_join_raises_warning_for_non_ddp_distributed(accelerator)\n": "",
        "    accelerator.state.distributed_type = original_state\n": "",
    },
}


def run(name: str) -> bool:
    """Run a program's ``main`` in this rank, and return whether it came to its end."""
    spec = importlib.util.find_spec(f"accelerate.test_utils.scripts.{name}")
    assert spec is not None and spec.origin is not None
    source = pathlib.Path(spec.origin).read_text()
    for old, new in _REPLACED.get(name, {}).items():
        assert old in source, f"{name} has changed: {old}"
        source = source.replace(old, new)
    program = types.ModuleType(name)
    exec(compile(_IMPORT.sub(r"\1\2 notebook_accel", source), spec.origin, "exec"), program.__dict__)
    program.main()
    return True


@pytest.mark.slow
@pytest.mark.usefixtures("engine")
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["test_ops", "test_sync", "test_script", "test_distributed_data_loop"])
def test_program_ends_without_an_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name == "test_sync":  # a shorter last window is divided as Accelerate does
        monkeypatch.setenv("NOTEBOOK_ACCEL_COMPAT", "accelerate")
    assert notebook_launcher(run, (name,), num_processes=2) == [True, True]
