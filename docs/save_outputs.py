"""Run example notebooks and save their outputs in them: ``.venv/bin/python docs/save_outputs.py [NOTEBOOK ...]``.

The outputs are those of a real run on this machine's CPUs. The seventh notebook needs Ray: ``PYTHONPATH=build/ray``
finds it after a run of ``.ci/ray``. Lines that begin with the time are left out: they tell how fast this machine is,
and differ from run to run.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
import tempfile
import time

import nbclient
import nbformat
from jupyter_core.utils import run_sync

_NOTEBOOKS = pathlib.Path(__file__).parents[1] / "example_notebooks"
_CELL_TIMEOUT_S = 300
_BREAK_S = 5.0  # of somebody who restarts a kernel
_CLOCKED = re.compile(r"^\[\d\d:\d\d\] rank .*\n", re.MULTILINE)


def main() -> None:
    """Run the named notebooks, by default all."""
    with tempfile.TemporaryDirectory() as folder:
        # The kernel has these: runs of this user aren't listed, and nothing is said of a machine that is busy.
        os.environ.update(XDG_STATE_HOME=f"{folder}/state", NOTEBOOK_ACCEL_PROFILE="off")
        for path in map(pathlib.Path, sys.argv[1:]) if sys.argv[1:] else sorted(_NOTEBOOKS.glob("*.ipynb")):
            notebook = nbformat.read(path, as_version=4)
            metadata = notebook.metadata.copy()
            _run(notebook, folder)
            notebook.metadata = metadata  # without this machine's version of Python
            nbformat.write(notebook, path)
            print(path.name)


def _run(notebook: nbformat.NotebookNode, folder: str) -> None:
    """Run the cells, and restart the kernel where a cell is tagged with it."""
    client = nbclient.NotebookClient(
        notebook, timeout=_CELL_TIMEOUT_S, record_timing=False, coalesce_streams=True,
        resources={"metadata": {"path": folder}},
    )  # fmt: skip
    with client.setup_kernel():
        for number, cell in enumerate(notebook.cells):
            if "restart-kernel" in cell.metadata.get("tags", ()):
                time.sleep(_BREAK_S)
                run_sync(client.km.restart_kernel)(now=True)
                run_sync(client.kc.wait_for_ready)(timeout=_CELL_TIMEOUT_S)
            client.execute_cell(cell, number)
            for output in cell.get("outputs", ()):
                if output.output_type == "stream":
                    output.text = _CLOCKED.sub("", output.text)


if __name__ == "__main__":
    main()
