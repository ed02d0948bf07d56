"""Tests of the settings of loggers that ranks take over from the notebook."""

from __future__ import annotations

import logging
import logging.handlers
import pathlib
import queue
import shutil
import sys
from collections.abc import Iterator

import pytest

from notebook_accel.launching import loggers
from notebook_accel.launching.loggers import LogHandler

NAME = "of_a_notebook.training"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger(NAME)
    yield logger
    for handler in [*logger.handlers]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def test_a_logger_without_settings_is_left_out(logger: logging.Logger) -> None:
    assert NAME not in loggers.settings()
    logger.setLevel(logging.DEBUG)
    assert loggers.settings()[NAME].level == logging.DEBUG


def test_handlers_of_streams_and_files_are_taken_over(logger: logging.Logger, tmp_path: pathlib.Path) -> None:
    file = logging.FileHandler(tmp_path / "train.log", mode="w")
    file.setFormatter(logging.Formatter("{levelname} {message}", style="{"))
    out = logging.StreamHandler(sys.stdout)
    out.setLevel(logging.ERROR)
    for handler in (file, out, logging.NullHandler()):
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    found = loggers.settings()[NAME]
    assert found.handlers == (
        LogHandler(str(tmp_path / "train.log"), 0, ("{levelname} {message}", None, "{"), ("locale", None)),
        LogHandler("stdout", logging.ERROR),
    )
    file.emit(logging.makeLogRecord({"msg": "from the notebook", "levelname": "INFO"}))
    file.close()
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    for _ in range(2):  # the second time, it has handlers
        loggers.take_over({NAME: found})
    logger.info("from a rank")
    assert not logger.propagate
    assert (tmp_path / "train.log").read_text().splitlines() == ["INFO from the notebook", "INFO from a rank"]


def test_what_goes_to_a_queue_is_written_by_the_rank(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logger.addHandler(logging.handlers.QueueHandler(records))
    logger.setLevel(logging.INFO)
    logger.propagate = False
    found = loggers.settings()[NAME]
    assert found.handlers == (LogHandler("stderr", 0),)
    loggers.take_over({NAME: found})  # as in a fork, which has the notebook's handler
    logger.info("from a rank")
    assert records.empty()
    assert capsys.readouterr().err == "from a rank\n"
    logger.handlers[0].setStream(sys.stdout)  # type: ignore[attr-defined]
    logger.addHandler(logging.handlers.QueueHandler(records))
    assert [handler.to for handler in loggers.settings()[NAME].handlers] == ["stdout"]


def test_a_file_keeps_its_encoding_and_is_rotated_by_the_notebook_alone(
    logger: logging.Logger, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "train.log"
    handler = logging.handlers.RotatingFileHandler(
        path, maxBytes=1, backupCount=1, encoding="latin-1", errors="replace"
    )
    logger.addHandler(handler)
    found = loggers.settings()
    logger.removeHandler(handler)
    loggers.take_over({NAME: found[NAME]})
    for text in ("früh", "spät \N{SNOWMAN}"):
        logger.error(text)
    assert path.read_bytes() == "früh\nspät ?\n".encode("latin-1")
    handler.emit(logging.makeLogRecord({"msg": "the notebook's"}))
    logger.error("the rank's")
    assert path.read_text() == "the notebook's\nthe rank's\n"
    handler.close()


def test_a_file_whose_folder_is_removed_is_no_error_for_the_code(
    logger: logging.Logger, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    handler = LogHandler(str(folder / "train.log"), 0)
    loggers.take_over({NAME: loggers.LoggerSettings(logging.INFO, False, (handler,))})
    logger.info("before")
    shutil.rmtree(folder)
    for _ in range(2):
        logger.info("lost")
    assert capsys.readouterr().err.count("Message: 'lost'") == 2
    folder.mkdir()
    logger.info("after")
    assert (folder / "train.log").read_text() == "after\n"


def test_packages_add_their_handlers_themselves(monkeypatch: pytest.MonkeyPatch, logger: logging.Logger) -> None:
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.setLevel(logging.ERROR)
    assert len(loggers.settings()[NAME].handlers) == 1
    monkeypatch.setitem(sys.modules, "of_a_notebook", logging)
    assert loggers.settings()[NAME] == loggers.LoggerSettings(logging.ERROR, True, ())


def test_a_folder_that_is_missing_is_no_error(logger: logging.Logger, tmp_path: pathlib.Path) -> None:
    handler = LogHandler(str(tmp_path / "elsewhere" / "train.log"), 0)
    loggers.take_over({NAME: loggers.LoggerSettings(logging.INFO, False, (handler,))})
    logger.info("lost")
    assert logger.handlers == []


class _WithoutText(logging.Formatter):
    def __init__(self) -> None:  # without logging's own
        self.color = ""


class _WithOtherTypes(logging.Formatter):
    def __init__(self) -> None:
        super().__init__()
        self._fmt = {"message": "text"}  # type: ignore[assignment]
        self.datefmt = len  # type: ignore[assignment]


@pytest.mark.parametrize("made", [_WithoutText, _WithOtherTypes])
def test_a_formatter_without_a_text_of_logging_is_left_out(logger: logging.Logger, made: type) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(made())
    logger.addHandler(handler)
    assert loggers.settings()[NAME].handlers == (LogHandler("stderr", 0),)


@pytest.mark.parametrize("text", [("%(color)s%(message)s", "%"), ("{color}{message}", "{"), ("%(color)d", "%")])
def test_a_message_without_a_field_of_the_format_appears(
    logger: logging.Logger, text: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    handler = LogHandler("stderr", 0, (text[0], None, text[1]))
    loggers.take_over({NAME: loggers.LoggerSettings(logging.INFO, False, (handler,))})
    logger.info("step %d", 1)
    assert capsys.readouterr().err == f"INFO:{NAME}:step 1\n"


def test_handlers_that_a_ranks_module_adds_too_write_once(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = (LogHandler("stderr", 0), LogHandler("stdout", 0), LogHandler("stdout", logging.ERROR))
    loggers.take_over({NAME: loggers.LoggerSettings(logging.INFO, False, handlers)})
    logger.error("before")
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.error("after")
    written = capsys.readouterr()
    assert written.err.split() == ["before", "after"]
    assert written.out.split() == ["before", "before", "after", "after"]
