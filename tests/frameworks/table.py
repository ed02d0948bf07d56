"""Writes the page about libraries: ``python -m tests.frameworks.table report.xml page.md``, from the tests' report."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import sys
import xml.etree.ElementTree
from collections.abc import Mapping, Sequence

from tests.frameworks.rows import CHECKS, ROWS, Row

_HEAD = """\
# Libraries

Programs of training libraries such as Transformers and Lightning run in a cell as they are. The ranks have the
environment that these libraries look for, so they find each other without a line for this package. Here is PyTorch's
own `DistributedDataParallel`:

```python
%load_ext notebook_accel
```

```python
%%distributed -n 2
import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group()
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10):
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.distributed.destroy_process_group()
loss.item()
```

## What was tried

Each program below follows its library's documentation; only the two with sharded models use our `Accelerator`. Each
runs on two ranks in a real notebook on the CPU, with gloo. `.ci/frameworks` runs them and writes this page; [the
programs](../tests/frameworks/programs) are tiny and download nothing. The columns say:

"""
_PASSED, _FAILED, _NOT_RUN = "yes", "**no**", "not run"


def outcomes(report: pathlib.Path) -> dict[tuple[str, str], str]:
    """Return what was found for each program and check: empty if it passed, else the reason of the failure."""
    found: dict[tuple[str, str], str] = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        name = re.fullmatch(r"test_(\w+)\[(\w+)\]", case.get("name", ""))
        if name is None:
            continue
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        if bad is not None and bad.get("type") == "pytest.skip":
            continue
        reason = "" if bad is None else (bad.get("message") or bad.tag).strip().splitlines()[0]
        found[name[2], name[1]] = reason
    return found


def page(found: Mapping[tuple[str, str], str], date: str) -> str:
    """Return the page."""
    checks = [f"- **{name}**: {text}." for name, text in CHECKS.items()]
    titles = ["program", "versions", *CHECKS]
    lines = ["| " + " | ".join(titles) + " |", "| " + " | ".join("---" for _ in titles) + " |"]
    lines += ["| " + " | ".join([row.name, _versions(row), *_marks(row, found)]) + " |" for row in ROWS]
    reasons = [line for row in ROWS for line in _reasons(row, found)]
    text = _HEAD + "\n".join([*checks, "", f"Tried on {date} with {_versions_of(['torch'])}:", "", *lines, ""])
    if reasons:
        text += "\n".join(["", "## What fails", "", *reasons, ""])
    return text + _TAIL


_TAIL = """
## What to know

- Every rank of a launch spends the time of its imports. `--preload transformers.trainer` lets [the
  template](launching.md#the-template) import the library once; later launches then start at once.
- The panel's loss is the number whose gradients the program computes, unless the program reports a metric named
  `loss`. If a library divides it by its accumulation steps, as Lightning does, the divided loss is shown; Accelerate's
  is shown undivided.
- The panel recognises an evaluation from its first batch if gradients are disabled around the loop, and from its fourth
  batch if they are disabled only inside it, as in Accelerate's and Ignite's.
- **numbers**: Accelerate's own `notebook_launcher` was called in a plain process with `ACCELERATE_USE_CPU=true`. On a
  machine without a GPU, each rank of Transformers' `Trainer` otherwise trains a model of its own there. In a notebook,
  it can't run Lightning's programs, since Lightning then starts ranks itself, and a program of Keras once hung.
"""


def _marks(row: Row, found: Mapping[tuple[str, str], str]) -> list[str]:
    results = [found.get((row.program, check)) for check in CHECKS]
    return [_NOT_RUN if result is None else _FAILED if result else _PASSED for result in results]


def _reasons(row: Row, found: Mapping[tuple[str, str], str]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for check in CHECKS:
        if reason := found.get((row.program, check)):
            by_reason.setdefault(reason, []).append(check)
    return [
        f"- {row.name} ({'all' if len(names) == len(CHECKS) else ', '.join(names)}): {reason}"
        for reason, names in by_reason.items()
    ]


def _versions(row: Row) -> str:
    return _versions_of(row.packages)


def _versions_of(packages: Sequence[str]) -> str:
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)


def main(report: str, target: str) -> None:
    """Write the page, with the date of the report."""
    path = pathlib.Path(report)
    suite = xml.etree.ElementTree.parse(path).find(".//testsuite")
    date = (suite.get("timestamp", "") if suite is not None else "")[:10]
    pathlib.Path(target).write_text(page(outcomes(path), date), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
