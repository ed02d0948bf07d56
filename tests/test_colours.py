"""Errors in colour: the same text, with what to look at marked."""

from __future__ import annotations

import re

from notebook_accel import colours
from tests import kernels

_TEXT = """RankFailedError: rank 1 of 2 failed at In[3], line 5: ValueError: no images
Traceback of rank 1:
Traceback (most recent call last):
  File "In[3]", line 5, in load
    raise ValueError("no images")
    ^^^^^
  | TypeError: in a group
json.decoder.JSONDecodeError
Last output of rank 1:
  reading: all
Fix: look again"""


def marked(text: str) -> list[str]:
    """What has a colour, with the colour's number."""
    return ["".join(found) for found in re.findall(r"\x1b\[([1-9]\d*)m(.*?)\x1b\[0m", text)]


def test_names_places_and_headings_are_marked_and_the_text_stays() -> None:
    coloured = colours.coloured(_TEXT)
    assert re.sub(r"\x1b\[\d+m", "", coloured) == _TEXT
    names = ["31RankFailedError", "31TypeError", "31json.decoder.JSONDecodeError"]
    places = ['32"In[3]"', "325", "36load", "31    ^^^^^"]
    headings = ["1Traceback of rank 1:", "1Last output of rank 1:", "1Fix:"]
    assert sorted(marked(coloured)) == sorted([*names, *places, *headings])


def test_a_notebook_shows_them_unless_it_was_told_not_to(kernel: kernels.Kernel) -> None:
    code = "from notebook_accel.errors import ConfigError\nraise ConfigError('no', fix='yes')"
    assert marked(kernel.run(code).coloured) == ["31ConfigError", "1Fix:"]
    assert kernel.run("%colors NoColor").status == "ok"
    plain = kernel.run(code)
    assert (plain.coloured, marked(plain.coloured)) == ("ConfigError: no\nFix: yes", [])
