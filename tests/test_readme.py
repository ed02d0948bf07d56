"""The README's statements are true."""

from __future__ import annotations

import pathlib
import re

import notebook_accel
from notebook_accel import config

_ROOT = pathlib.Path(__file__).parents[1]
_README = (_ROOT / "README.md").read_text(encoding="utf-8")


def _blocks() -> list[str]:
    return re.findall(r"^```[a-z]*\n(.*?)^```$", _README, flags=re.MULTILINE | re.DOTALL)


def test_first_block_is_the_two_commands() -> None:
    main_job, tests = _blocks()[0].splitlines()
    for command in (main_job, tests):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")
        assert " -c constraints.txt " in command
    assert main_job.endswith(" && .venv/bin/ipython example_notebooks/01_train_on_every_device.ipynb")
    assert tests.endswith(" && .venv/bin/pytest")


def test_table_has_every_option_as_it_is() -> None:
    rows = [f"| `{option.name}` | {_default(option)} | {option.help}{_choices(option)} |" for option in config.fields()]
    table = "\n".join(["| option | default | what it does |", "| --- | --- | --- |", *rows, ""])
    assert table in _README, f"the README's table of options should be:\n{table}"


def _default(option: config.Option) -> str:
    return "" if option.default in (None, "", ()) else f"`{option.default}`"


def _choices(option: config.Option) -> str:
    return f" One of {', '.join(f'`{choice}`' for choice in option.choices)}." if option.choices else ""


def test_every_python_block_compiles_and_imports_what_exists() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", _README, flags=re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        source = "\n".join(line for line in block.splitlines() if not line.startswith("%"))
        compile(source, "README.md", "exec")
        for names in re.findall(r"from notebook_accel import (.*)", source):
            for name in names.split(", "):
                assert hasattr(notebook_accel, name)


def test_links_inside_the_repository_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!http|#)([^)]+)\)", _README)
    assert links
    for link in links:
        assert (_ROOT / link).exists(), link
