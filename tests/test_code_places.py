from __future__ import annotations

import sys
import types

import torch

from notebook_accel import code_places


def run(source: str, filename: str, **names: object) -> str:
    namespace: dict[str, object] = {"here": lambda: code_places.describe(sys._getframe(1)), **names}
    exec(compile(source, filename, "exec"), namespace)
    found = namespace["found"]
    assert isinstance(found, str)
    return found


def test_a_line_of_the_users_own() -> None:
    assert run("\nfound = here()", "/home/user/train.py") == "/home/user/train.py, line 2"


def test_a_cell_by_its_name() -> None:
    code_places.name_files({"/tmp/ipykernel_1/2.py": "In[3]"})
    assert run("\n\nfound = here()", "/tmp/ipykernel_1/2.py") == "In[3], line 3"


def library(filename: str) -> types.FunctionType:
    namespace: dict[str, object] = {}
    source = "def reduce(call):\n    return inner(call)\ndef inner(call):\n    return call()"
    exec(compile(source, filename, "exec"), namespace)
    made = namespace["reduce"]
    assert isinstance(made, types.FunctionType)
    return made


def test_the_call_that_left_the_users_code() -> None:
    installed = f"{types.__file__.rpartition('/')[0]}/some_library.py"
    call = "found = reduce(here)"
    assert run(call, "train.py", reduce=library(installed)) == "reduce at train.py, line 1"
    assert run(call, "train.py", reduce=library("helpers.py")) == "helpers.py, line 4"


def test_generated_code_is_not_the_users() -> None:
    graph = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Identity()))
    found: list[str] = []
    graph.get_submodule("0").register_forward_hook(lambda *_: found.append(code_places.describe(sys._getframe(1))))
    exec(compile("graph(1)", "train.py", "exec"), {"graph": graph})
    assert found == ["call_wrapped at train.py, line 1"]


def test_no_frame() -> None:
    assert code_places.describe(None) == ""
