"""Set-up finds a Python that will do, and says what the system lacks."""

from __future__ import annotations

import sys

import pytest

from infra import setup


@pytest.mark.parametrize("version", setup.SUPPORTED)
def test_this_python_makes_the_environment_where_it_will_do(version):
    assert setup.interpreter(version) == sys.executable


@pytest.mark.parametrize("version", [(3, 9), (3, 10), (3, 13)])
def test_another_python_lets_uv_find_one_that_does(version):
    assert setup.interpreter(version) == ">=3.11,<=3.12.99"


@pytest.mark.parametrize(
    ("tools", "ensurepip", "lacks"),
    [
        ({"bwrap"}, True, {}),
        ({"bwrap"}, False, {"python3 -m venv": "python3-venv"}),
        ({"bwrap", "uv"}, False, {}),
        (set(), True, {"bwrap": "bubblewrap"}),
    ],
)
def test_what_the_system_lacks_is_named_with_its_package(monkeypatch, tools, ensurepip, lacks):
    monkeypatch.setattr(setup.shutil, "which", lambda name: f"/usr/bin/{name}" if name in tools else None)
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: ensurepip or None)
    assert setup.lacking() == lacks
