"""schemathesis for the services' HTTP: whatever is sent, no answer is a 5xx.

It is no dependency of the tests: whatever is installed beside them is mined for problems. `make fuzz` runs its tests in an
environment of its own, and `make ci` that. ETUDE_TEST_FUZZ says what they do elsewhere: `auto` (the default) skips them where
schemathesis is not installed, `require` fails them. ETUDE_FUZZ_CASES: how many of each operation and kind.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

POLICIES = ("auto", "require")
CASES = int(os.environ.get("ETUDE_FUZZ_CASES", "25"))


def library() -> Any:
    """schemathesis; skips or fails the module that asks for it."""
    policy = os.environ.get("ETUDE_TEST_FUZZ", "auto")
    if policy not in POLICIES:
        pytest.fail(f"ETUDE_TEST_FUZZ: found {policy!r}; allowed: {', '.join(POLICIES)}", pytrace=False)
    if policy == "require":
        return importlib.import_module("schemathesis")
    return pytest.importorskip("schemathesis", reason="schemathesis has an environment of its own: make fuzz")


def explore(document: dict[str, Any], path: str, method: str, ask: Callable[[Any], None]) -> None:
    """`ask` gets cases as the document allows them, then ones that it does not, where it says anything of a query or a body: a part
    of a path is a text, whatever it is."""
    schemathesis = library()
    operation = schemathesis.openapi.from_dict(document)[path][method.upper()]
    told = document["paths"][path][method]
    modes = [schemathesis.GenerationMode.POSITIVE]
    if "requestBody" in told or any(one["in"] == "query" for one in told.get("parameters", ())):
        modes.append(schemathesis.GenerationMode.NEGATIVE)
    for mode in modes:
        quiet = settings(
            max_examples=CASES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        quiet(given(case=operation.as_strategy(generation_mode=mode))(ask))()
