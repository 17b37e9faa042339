"""Which functions become problems: none that an agent finds in its own sandbox."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.curator import build
from services.curator.mine import Function, Inventory, SourceFile, carried

CARRIED = frozenset(["json", "json.decoder", "_operator", "io", "posixpath", "os.path"])


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("json.decoder", True),  # loaded
        ("posixpath", True),  # frozen
        ("operator", True),  # its native half is built in
        ("_pyio", True),  # the same in Python
        ("json.tool", False),  # a file, which a mount hides
        ("textwrap", False),
    ],
)
def test_a_module_that_the_interpreter_carries_makes_no_problems(module: str, expected: bool) -> None:
    function = Function(distribution="python", module=module, qualname="f", source="", entry="f", executable=True)
    assert carried(function, CARRIED) is expected
    function.distribution = "other"  # of that name, but not in the sandbox
    assert not carried(function, CARRIED)


def test_a_text_that_the_standard_library_has_too_counts_as_its_own(tmp_path: Path) -> None:
    """Else the origin that is taken away would be another module than the one that can be imported."""
    source = (
        "def total(values):\n    result = 0\n    for value in values:\n        result += 2 * value\n    return result\n"
    )
    files = []
    for distribution in ("before", "python"):
        path = tmp_path / f"{distribution}.py"
        path.write_text(source)
        files.append(SourceFile(str(path), distribution, "1", "tools", "MIT"))
    with ThreadPoolExecutor(1) as workers:
        (function,) = build._mine(workers, Inventory(files), lambda stage, done, of: None)
    assert (function.origin, function.executable) == ("python:tools:total", True)
