"""The process of SGLang's server."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys

from services.inference.sglang.child import Child


def test_nothing_is_loaded_between_fork_and_exec(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a library is loaded in the forked process")

    monkeypatch.setattr(ctypes, "CDLL", refuse)

    async def start() -> int:
        child = await Child.start([sys.executable, "-c", "raise SystemExit(7)"], dict(os.environ))
        return await child.ended

    assert asyncio.run(start()) == 7
