"""Plug-ins: what is found by name, and what a broken one is not taken for."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.plugins import Plugins, UnknownName


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
