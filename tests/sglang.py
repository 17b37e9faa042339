"""The real SGLang that tests run against: infra/sglang_cpu.

ETUDE_TEST_SGLANG says what a test does: `auto` (the default) runs it where the environment is installed, `require`
installs it and fails where that cannot be done, `none` skips it.
"""

from __future__ import annotations

import os

import pytest

from infra import sglang_cpu

POLICIES = ("auto", "require", "none")


def interpreter() -> str:
    """That of SGLang's environment; skips or fails the test where there is none."""
    policy = os.environ.get("ETUDE_TEST_SGLANG", "auto")
    if policy not in POLICIES:
        pytest.fail(f"ETUDE_TEST_SGLANG: found {policy!r}; allowed: {', '.join(POLICIES)}")
    if policy == "require":
        try:
            return str(sglang_cpu.install())
        except sglang_cpu.CannotInstall as error:
            pytest.fail(str(error))
    found = sglang_cpu.python() if policy == "auto" else None
    if found is None:
        pytest.skip("SGLang is not installed here; `python -m infra.sglang_cpu` installs it (5.8 GB)")
    return str(found)
