"""Tests of the filters of warnings that ranks take over from the notebook."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import warnings

import pytest

from notebook_accel.launching.ranks import warning_filters


def _filters() -> list[tuple[str, str]]:
    return [(action, name) for action, _, (_, name), _, _ in warning_filters.settings()]


def test_the_notebooks_filters_count_before_pythons_and_after_those_of_libraries() -> None:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("always", FutureWarning)
        warnings.filterwarnings("error", "the .* way", UserWarning, "mine", 7)
        found = warning_filters.settings()
        warnings.resetwarnings()
        warning_filters.take_over(found)
        assert warning_filters.settings() == found
        with pytest.raises(UserWarning, match="The old WAY"):
            warnings.warn_explicit("The old WAY, again", UserWarning, "mine.py", 7, module="mine")
        with warnings.catch_warnings(record=True) as shown:
            warnings.warn_explicit("The old WAY, again", UserWarning, "others.py", 7, module="others")
            warnings.warn_explicit("Another way", UserWarning, "mine.py", 7, module="mine")
        assert [str(each.message) for each in shown] == ["The old WAY, again", "Another way"]
        warnings.resetwarnings()
        warnings.simplefilter("default", DeprecationWarning)
        warnings.filterwarnings("default", category=PendingDeprecationWarning, module="__main__")
        warnings.filterwarnings("ignore", "of a library")
        warning_filters.take_over(found)
        assert _filters() == [
            ("ignore", "Warning"),
            ("error", "UserWarning"),
            ("always", "FutureWarning"),
            ("default", "PendingDeprecationWarning"),
            ("default", "DeprecationWarning"),
        ]


def test_filter_for_several_classes_is_one_for_each() -> None:
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("ignore", (UserWarning, FutureWarning))  # type: ignore[arg-type]
        warnings.warn("left out", FutureWarning, stacklevel=1)
        assert _filters() == [("ignore", "UserWarning"), ("ignore", "FutureWarning")]


def test_filter_for_a_class_follows_when_its_module_is_imported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    (tmp_path / "of_warnings.py").write_text("class Mine(UserWarning): pass\nclass Yours(UserWarning): pass\n")
    found = [("ignore", "", ("of_warnings", name), "", 0) for name in ("Mine", "Yours", "Nobodys")]
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warning_filters.take_over([*found, ("error", "", ("builtins", "UserWarning"), "", 0)])
        assert _filters() == [("error", "UserWarning")]
        assert importlib.util.find_spec("of_warnings") is not None  # asking doesn't import it
        import of_warnings  # type: ignore[import-not-found]

        del sys.modules["of_warnings"]
        warnings.warn("left out", of_warnings.Mine, stacklevel=1)
        assert sorted(_filters()) == [("error", "UserWarning"), ("ignore", "Mine"), ("ignore", "Yours")]
