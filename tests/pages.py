"""The pages for users, README and docs/*.md, as data: their code blocks, and what a comment before a block says of it.

A comment stands alone on the lines before a block. GitHub and the site show none of them:

- ``<!-- not run: needs two GPUs -->``: the block is compiled only. Shell commands of others never run.
- ``<!-- command 1 -->``: the block is one of the README's two commands, which ``.ci/run`` finds by this mark.
- ``<!-- raises RankFailedError -->``: running the block raises this.
- ``<!-- output -->``: the block before it shows these lines, apart from numbers and paths; ``...`` stands for any
  others.
- ``<!-- run first``, lines of Python, ``-->``: a cell that a reader has run already, or that has raised what the page
  shows (``run first, raises PayloadError``).
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("docs/*.md"))]

_BLOCK_OR_COMMENT = re.compile(
    r"^```(?P<language>[^`\n]*)\n(?P<text>.*?)^```$|^<!-- (?P<comment>.*?)-->$", re.MULTILINE | re.DOTALL
)
_SET_UP = re.compile(r"run first(?:, (?P<note>raises \w+))?\n(?P<text>.*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page, or a set-up in a comment.

    Attributes:
        page: The page's file name.
        line: The number of its first line there, from 1.
        language: The word after the fence; empty without one.
        text: Its lines.
        note: The comment before it; empty without one.
    """

    page: str
    line: int
    language: str
    text: str
    note: str

    def __str__(self) -> str:
        return f"{self.page}, line {self.line}:\n{self.text}"

    @property
    def why_not_run(self) -> str:
        """The reason why the block is compiled only; empty if it runs."""
        return self._said("not run: ")

    @property
    def is_command(self) -> bool:
        return self.note.startswith("command ")

    @property
    def raises(self) -> str:
        """The name of the error that running it raises; empty if it raises none."""
        return self._said("raises ")

    @property
    def is_output(self) -> bool:
        return self.note == "output"

    @property
    def is_shell(self) -> bool:
        return self.language in ("sh", "bash")

    @property
    def cell(self) -> str:
        """The text without lines of ``%pip``, which would change the environment of the tests."""
        return "".join(line for line in self.text.splitlines(keepends=True) if not line.startswith("%pip "))

    @property
    def python(self) -> str:
        """The text without the lines of magics."""
        return "\n".join("" if line.startswith("%") else line for line in self.text.splitlines())

    def _said(self, beginning: str) -> str:
        return self.note.removeprefix(beginning) if self.note.startswith(beginning) else ""


def blocks(page: pathlib.Path) -> list[Block]:
    """Return the page's blocks in order. A comment belongs to the block that follows it with nothing in between."""
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    note, end_of_note = "", 0
    for match in _BLOCK_OR_COMMENT.finditer(text):
        comment, line = match["comment"], text.count("\n", 0, match.start()) + 2
        if comment is None:
            follows = not text[end_of_note : match.start()].strip()
            found.append(Block(page.name, line, match["language"], match["text"], note if follows else ""))
            note = ""
        elif (set_up := _SET_UP.fullmatch(comment)) is not None:
            found.append(Block(page.name, line, "python", set_up["text"], set_up["note"] or ""))
        else:
            note, end_of_note = comment.strip(), match.end()
    return found


def python_blocks(page: pathlib.Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def without_blocks(page: pathlib.Path) -> str:
    """Return the page's prose."""
    return _BLOCK_OR_COMMENT.sub("", page.read_text(encoding="utf-8"))


def is_shown(expected: str, shown: str) -> bool:
    """Return whether a page's output was shown, apart from numbers, paths, line ends, and what ``...`` stands for."""
    pattern = ".*".join(re.escape(_without_details(part)) for part in expected.split("..."))
    return re.search(pattern, _without_details(shown)) is not None


def _without_details(text: str) -> str:
    text = re.sub(r"^[ ~^]+$", "", text, flags=re.MULTILINE)  # below a traceback's lines, in some versions of Python
    text = re.sub(r"(?<![\w.])/[\w./-]+", "/PATH", text.replace(tempfile.gettempdir(), "/tmp"))  # may have spaces
    return " ".join(re.sub(r"\d+(\.\d+)?(e-\d+)?", "0", text).split())
