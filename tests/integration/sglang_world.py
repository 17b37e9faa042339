"""A platform whose replica serves with the stand-in for SGLang (fake_sglang.py)."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from services.inference.service import Inference
from tests.integration import fake_sglang
from tests.integration.engine_platform import Platform, ask, run
from tests.patience import eventually

SERVER = "services.inference.sglang.server"


def wrapper(folder: Path) -> str:
    """What stands in for the interpreter of SGLang's environment."""
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nshift 2\nexec "{sys.executable}" "{fake_sglang.__file__}" "$@"\n')
    script.chmod(0o755)
    return str(script)


class World:
    """A platform whose replica runs the stand-in."""

    def __init__(self, platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
        self.p = platform
        self.knobs = platform.state / "knobs.json"
        monkeypatch.setenv("FAKE_SGLANG", str(self.knobs))
        self.changes: dict[str, Any] = {
            "engine": "sglang",
            "sglang_python": wrapper(platform.state),
            "sglang_device": "cpu",
            "sglang_dtype": "float32",
            "sglang_start_s": 60.0,
        }

    def wrong(self, **knobs: Any) -> None:
        temporary = self.knobs.with_suffix(".tmp")
        temporary.write_text(json.dumps(knobs))
        temporary.replace(self.knobs)

    @contextlib.asynccontextmanager
    async def replica(self, **changes: Any) -> AsyncIterator[Inference]:
        async with self.p.replica(**{**self.changes, **changes}) as replica:
            yield replica

    async def server(self, replica: Inference) -> dict[str, Any]:
        return (await ask((await ask(replica.health.url, "/server_info"))[1]["url"], "/server_info"))[1]

    async def asked(self, replica: Inference, count: int) -> None:
        """Wait until the server was asked for so many generations."""

        async def enough() -> bool:
            return len((await self.server(replica))["asked"]) >= count

        await eventually(enough, f"{count} generations to be asked for")

    async def refused(self, replica: Inference) -> None:
        """Wait until the server has refused a version."""

        async def once() -> bool:
            return (await self.server(replica))["refused"] > 0

        await eventually(once, "a version to be refused")

    async def waits(self, replica: Inference, text: str) -> None:
        async def named() -> bool:
            found = (await ask(replica.health.url, "/readyz"))[1]["waits"]
            return any(text in wait["waits_on"] for wait in found)

        await eventually(named, f"/readyz to wait on {text!r}", 60)

    async def ready(self, replica: Inference) -> None:
        async def answers() -> bool:
            return (await ask(replica.health.url, "/readyz"))[0] == 200

        await eventually(answers, "/readyz to answer 200", 60)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in {"PROBE_EVERY_S": 0.1, "ASK_EVERY_S": 0.05, "FIRST_DELAY_S": 0.05, "GRACE_S": 3.0}.items():
        monkeypatch.setattr(f"{SERVER}.{name}", seconds)
    monkeypatch.setattr("services.inference.candidates.FIRST_DELAY_S", 0.05)


@pytest.fixture
def world(tmp_path, monkeypatch) -> Callable[[Any], None]:
    def go(test: Any) -> None:
        async def body(platform: Platform) -> None:
            await test(World(platform, monkeypatch))

        run(body, tmp_path)

    return go
