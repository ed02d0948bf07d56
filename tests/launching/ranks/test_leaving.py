"""The end of a rank: what its program has left open is written, in the order in which Python would do it."""

from __future__ import annotations

import gzip
import pathlib
import shelve
import subprocess
import sys
import zipfile
from collections.abc import Callable


def _read_shelf(path: pathlib.Path) -> str:
    with shelve.open(str(path)) as shelf:
        return "".join(shelf["a"])


# A program, and then the end of a rank that has run it.
_ENDED = """
import os, sys
sys.path.append(os.getcwd())
from notebook_accel.launching.ranks import leaving
end = [(leaving._destroy_objects, len(sys.modules)), (os._exit, 0)]
{program}
for step, argument in tuple(end):
    step(argument)
"""
_WRITERS: dict[str, tuple[str, Callable[[pathlib.Path], str]]] = {
    "text": ("{f} = open('{f}', 'w'); {f}.write('text')", pathlib.Path.read_text),
    "binary": ("{f} = open('{f}', 'wb'); {f}.write(b'text')", pathlib.Path.read_text),
    "gzip": (
        "import gzip; {f} = gzip.open('{f}', 'wt'); {f}.write('text')",
        lambda path: gzip.decompress(path.read_bytes()).decode(),
    ),
    "zip": (
        "import zipfile; {f} = zipfile.ZipFile('{f}', 'w'); {f}.writestr('a', 'text')",
        lambda path: zipfile.ZipFile(path).read("a").decode(),
    ),
    "shelve": (
        "import shelve; {f} = shelve.open('{f}', writeback=True); {f}['a'] = ['te']; {f}['a'].append('xt')",
        _read_shelf,
    ),
}
_PLACES = {
    "name": "{opening}",
    "closure": "def make_{f}():\n    {opening}\n    return lambda: {f}\nkept_{f} = make_{f}()",
    "default": "def uses_{f}(default=[]):\n    {opening}\n    default.append({f})\nuses_{f}()",
    "class": "class Log_{f}:\n    {opening}",
    "cycle": (
        "class Log_{f}:\n    def __init__(self):\n        {opening}\n        self.me, self.f = self, {f}\n"
        "log_{f} = Log_{f}()"
    ),
    "module": 'with open("of_{f}.py", "w") as part: part.write("""{opening}""")\nimport of_{f}',
    "library": "import json\n{opening}\njson.{f} = {f}",
}


def leave(folder: pathlib.Path, program: str) -> str:
    """Run a program that ends as a rank does, in this folder, and return what it prints on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", _ENDED.format(program=program)],
        capture_output=True, text=True, timeout=60, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_files_that_are_left_open_are_whole(tmp_path: pathlib.Path) -> None:
    opened = [("name", kind) for kind in _WRITERS]
    opened += [(place, kind) for place in _PLACES if place not in ("name", "library") for kind in ("text", "gzip")]
    opened += [("library", "text")]
    files = {f"{place}_{kind}": (place, *_WRITERS[kind]) for place, kind in opened}
    program = [_PLACES[place].format(f=f, opening=opening.format(f=f)) for f, (place, opening, _) in files.items()]
    assert leave(tmp_path, "\n".join(program)) == ""
    assert {f: read(tmp_path / f) for f, (_, _, read) in files.items()} == dict.fromkeys(files, "text")


def test_finalizers_still_find_what_they_use(tmp_path: pathlib.Path) -> None:
    """Modules, functions, classes and constants go last, also for objects in a cycle, and an error hides nothing."""
    said = leave(tmp_path, """
import csv
PATH = "rows"
def rows(): return [Row(1), Row(2)]
class Row(int): pass
class Writes:
    def __init__(self): self.me, self.file = self, open("own", "w")
    def __del__(self):
        csv.writer(open(PATH, "w")).writerows([[row] for row in rows()])
        self.file.write("text")
class Fails:
    def __del__(self): raise ValueError("in a finalizer")
writes, fails = Writes(), Fails()
""")  # fmt: skip
    assert (tmp_path / "rows").read_text().split() == ["1", "2"]
    assert (tmp_path / "own").read_text() == "text"
    assert said.count("ValueError: in a finalizer") == 1


def test_finalizer_in_a_cycle_runs_though_no_file_is_open(tmp_path: pathlib.Path) -> None:
    leave(tmp_path, """
class Writes:
    def __init__(self): self.me = self
    def __del__(self): open("f", "w").write("text")
writes = Writes()
""")  # fmt: skip
    assert (tmp_path / "f").read_text() == "text"


def test_file_behind_a_replaced_standard_output_is_written(tmp_path: pathlib.Path) -> None:
    leave(tmp_path, """
import gzip
class Tee:
    def __init__(self): self.file = gzip.open("f", "wt")
    def write(self, text): return self.file.write(text)
    def flush(self): pass
sys.stdout = Tee()
print("text")
""")  # fmt: skip
    assert gzip.decompress((tmp_path / "f").read_bytes()) == b"text\n"


def test_daemon_threads_that_miss_their_names_say_nothing(tmp_path: pathlib.Path) -> None:
    said = leave(tmp_path, """
import threading
started, ended = threading.Event(), threading.Event()
def run(ended=ended):
    try:
        while True:
            count[0] += 1
            started.set()
    finally:
        ended.set()
count = [0]
thread = threading.Thread(target=run, daemon=True)
thread.start()
started.wait(30)
end.insert(1, (thread.join, 30))
""")  # fmt: skip
    assert said == ""


_FORKED = """
import atexit, logging.handlers, os, pathlib, shutil, sys, tempfile, weakref
from notebook_accel.launching.ranks import leaving

class Kept:
    pass

def register(name):
    folder = tempfile.mkdtemp(prefix=f"{name}-by-function-", dir=".")
    atexit.register(shutil.rmtree, folder)
    handler = logging.handlers.MemoryHandler(100, target=logging.FileHandler(f"{name}.log"))
    logging.getLogger(name).addHandler(handler)
    logging.getLogger(name).warning("buffered")
    kept = Kept()
    weakref.finalize(kept, pathlib.Path(f"{name}.finalized").touch)
    return tempfile.TemporaryDirectory(prefix=f"{name}-by-object-", dir="."), kept

def be_a_rank(end=os._exit):  # a name of the function's own: those of this module go, too
    leaving.begin()
    sys.modules["json"].kept = register("rank")  # in a module that doesn't go with the user's names
    leaving.leave(is_waited_for=False, inherited_modules=len(sys.modules))
    end(0)

before = register("template")
leaving.forget_exits()
pid = os.fork()
if pid == 0:
    be_a_rank()
assert os.waitpid(pid, 0)[1] == 0
print(sorted(name.rpartition("-")[0] if "-by-" in name else name for name in os.listdir()), flush=True)
os._exit(0)
"""


def test_only_what_a_rank_registers_for_the_exit_runs_there(tmp_path: pathlib.Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import json\n{_FORKED}"],
        capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path,
    )  # fmt: skip
    found = ["rank.finalized", "rank.log", "template-by-function", "template-by-object", "template.log"]
    assert done.stdout == f"{found}\n", done.stderr
    assert (tmp_path / "rank.log").read_text() == "buffered\n"
    assert (tmp_path / "template.log").read_text() == ""
