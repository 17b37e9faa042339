"""Plug-ins: what is found by name, and what a broken one is not taken for."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.plugins import Plugins, UnknownName, Unloadable


def test_a_name_that_nothing_has_is_unknown() -> None:
    with pytest.raises(UnknownName, match="riddle"):
        Plugins("etude.none", {}).load("riddle")


def test_a_module_that_fails_while_it_is_imported_is_not_taken_for_an_unknown_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_plugin.py").write_text("{}['MISSING']\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins = Plugins("etude.none", {"broken": "broken_plugin:Thing"})
    assert plugins.names() == ["broken"]
    with pytest.raises(KeyError, match="MISSING") as caught:
        plugins.load("broken")
    assert not isinstance(caught.value, UnknownName)


def test_an_entry_point_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_plugin.py").write_text("import nothing_of_this_name\n")
    about = tmp_path / "broken_plugin-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[etude.none]\nbroken = broken_plugin:Thing\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = (
        r"'broken' \(broken_plugin:Thing, group 'etude\.none'\) cannot be loaded: ModuleNotFoundError: No module named"
    )
    with pytest.raises(Unloadable, match=said):
        Plugins("etude.none", {}).load("broken")
