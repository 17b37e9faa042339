"""Types are worked out before threads decode them for the first time."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from shared import bus as buses
from shared import objects as stores
from shared.plugins import Plugins

SOURCE = """
from __future__ import annotations
import msgspec

class Inner(msgspec.Struct):
    x: int

class Outer(msgspec.Struct):
    inner: Inner
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    (tmp_path / "told_late.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("told_late")
    del sys.modules["told_late"]


def connect_bus(folder: Path) -> None:
    buses.connect(f"sqlite:{folder / 'bus.db'}", client="test")


def connect_objects(folder: Path) -> None:
    stores.connect(f"file:{folder / 'objects'}")


def load_plugin(folder: Path) -> None:
    Plugins("etude.test", {"one": "shared.structs:settle"}).load("one")


@pytest.mark.parametrize("begin", [connect_bus, connect_objects, load_plugin])
def test_what_comes_before_threads_leaves_no_type_to_be_worked_out(
    begin: Callable[[Path], None], module: types.ModuleType, tmp_path: Path
) -> None:
    begin(tmp_path)
    outer = module.Outer
    del module.Inner  # a type that is worked out only now does not find it
    assert msgspec.json.decode(b'{"inner": {"x": 1}}', type=outer).inner.x == 1


def test_a_type_that_was_not_settled_is_worked_out_at_its_first_use(module: types.ModuleType) -> None:
    outer = module.Outer
    del module.Inner
    with pytest.raises(NameError, match="Inner"):
        msgspec.json.decode(b'{"inner": {"x": 1}}', type=outer)
