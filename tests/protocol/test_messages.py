"""Messages between processes."""

from __future__ import annotations

import types
import typing

import msgspec
import pytest

from notebook_accel.protocol import agent_messages, elastic_messages, session_messages


@pytest.mark.parametrize(
    "module", [agent_messages, elastic_messages, session_messages], ids=lambda module: module.__name__.split(".")[-1]
)
def test_every_message_has_a_receiver_that_decodes_it(module: types.ModuleType) -> None:
    unions = [value for value in vars(module).values() if isinstance(value, types.UnionType)]
    decoded = {member for union in unions for member in typing.get_args(union)}
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    structs = [made for made in own if isinstance(made, type) and issubclass(made, msgspec.Struct)]
    messages = [made for made in structs if made.__struct_config__.tag and not made.__name__.startswith("_")]
    alone = [made for made in messages if hasattr(module, f"decode_{made.__name__.lower()}")]
    assert messages
    assert [made.__name__ for made in messages if made not in {*decoded, *alone}] == []
