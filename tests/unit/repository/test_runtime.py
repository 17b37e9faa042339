"""The folder that sandboxes mount: what pytest imports is compiled in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from shared.environments.repository import runtime

IMPORTED = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import pytest, _pytest._code, _pytest._io.terminalwriter
found = [module for module in sys.modules.values() if str(getattr(module, "__file__", "")).startswith(sys.argv[1])]
print(json.dumps([module.__name__ for module in found if not os.path.exists(module.__cached__ or "")]))
print(len(found))
"""


def test_all_that_pytest_imports_is_compiled(tmp_path: Path) -> None:
    site = runtime.made(tmp_path) / "site"
    argv = [sys.executable, "-I", "-S", "-B", "-c", IMPORTED, str(site)]
    missing, count = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    assert json.loads(missing) == []
    assert int(count) > 50
    assert len(list(site.rglob("pygments/lexers/__pycache__/*"))) < 10  # the hundreds of others are not
