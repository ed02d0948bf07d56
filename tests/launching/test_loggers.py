"""Tests of the settings of loggers that ranks take over from the notebook."""

from __future__ import annotations

import logging
import logging.handlers
import pathlib
import queue
import sys
from collections.abc import Iterator

import pytest

from notebook_accel.launching import loggers
from notebook_accel.launching.loggers import LoggerSettings

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


def test_a_handler_becomes_one_for_the_output_in_its_format(
    logger: logging.Logger, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = logging.FileHandler(tmp_path / "train.log")
    file.setFormatter(logging.Formatter("{levelname} {message}", style="{"))
    for handler in (logging.NullHandler(), file):
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    found = loggers.settings()[NAME]
    assert found == LoggerSettings(logging.INFO, False, ("{levelname} {message}", None, "{"))
    out = logging.StreamHandler(sys.stdout)
    out.setLevel(logging.ERROR)
    logger.addHandler(out)
    assert loggers.settings()[NAME] == LoggerSettings(logging.INFO, False, (), logging.ERROR)
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    for _ in range(2):  # the second time, it has a handler
        loggers.take_over({NAME: found})
    logger.info("from a rank")
    assert not logger.propagate
    assert capsys.readouterr().err == "INFO from a rank\n"
    assert (tmp_path / "train.log").read_text() == ""
    file.close()


def test_what_goes_to_a_queue_is_written_by_the_rank(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    logger.addHandler(logging.handlers.QueueHandler(records))
    logger.setLevel(logging.INFO)
    logger.propagate = False
    loggers.take_over({NAME: loggers.settings()[NAME]})  # as in a fork, which has the notebook's handler
    logger.info("from a rank")
    assert records.empty()
    assert capsys.readouterr().err == "from a rank\n"


def test_packages_add_their_handlers_themselves(monkeypatch: pytest.MonkeyPatch, logger: logging.Logger) -> None:
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.setLevel(logging.ERROR)
    assert loggers.settings()[NAME].format == ()
    monkeypatch.setitem(sys.modules, "of_a_notebook", logging)
    assert loggers.settings()[NAME] == LoggerSettings(logging.ERROR, True)


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
    assert loggers.settings()[NAME].format == ()


@pytest.mark.parametrize("text", [("%(color)s%(message)s", "%"), ("{color}{message}", "{"), ("%(color)d", "%")])
def test_a_message_without_a_field_of_the_format_appears(
    logger: logging.Logger, text: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    loggers.take_over({NAME: LoggerSettings(logging.INFO, False, (text[0], None, text[1]))})
    logger.info("step %d", 1)
    assert capsys.readouterr().err == f"INFO:{NAME}:step 1\n"


def test_handlers_that_a_ranks_module_adds_too_write_once(
    logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    loggers.take_over({NAME: LoggerSettings(logging.INFO, False, ())})
    logger.error("before")
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.error("after")
    assert capsys.readouterr().err.split() == ["before", "after"]
