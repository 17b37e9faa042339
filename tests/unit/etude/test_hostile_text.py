"""What others have said is printed as it is: it steers neither the terminal nor the table."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rich.console import Console

from etude import history, run_list
from etude import status as status_command
from etude.standing import Standings
from shared.contracts.messages import RunCommand
from shared.contracts.run import Ref
from shared.settings import ServiceSettings
from shared.telemetry import Health
from tests.ruling import status

RUN = "r-20260101T000000-0001"
HOSTILE = "\x1b]0;taken\x07\u202ewas [/gone] [link=http://evil.test]here"
SHOWN = "⟨ESC⟩]0;taken⟨BEL⟩⟨U+202E⟩was [/gone] [link=http://evil.test]here"
REF = Ref(key="c.json", size=1, checksum="0" * 32)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


def test_in_the_history_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    told = history.History(RUN)
    told.hear(RunCommand(run=RUN, action="start", by="ann", reason=HOSTILE, config=REF), 1.0)
    Console().print(history.table(told.entries))
    assert SHOWN in capsys.readouterr().out


def test_in_the_list_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = Standings()
    found.hear(status(RUN, "running", REF, by="ann", reason=HOSTILE), 1.0)
    run_list.show(found)
    assert SHOWN in capsys.readouterr().out


def test_in_what_a_service_waits_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with Health("reward", ServiceSettings(state=tmp_path, port=0)) as health:
            health.wait_on(HOSTILE)
            await asyncio.to_thread(status_command.show, tmp_path, as_json=False)
            health.clear(HOSTILE)

    asyncio.run(scenario())
    assert SHOWN in capsys.readouterr().out
