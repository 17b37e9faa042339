"""Running every benchmark: what one of them does wrong costs the others nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import all as every
from benchmarks import records
from benchmarks.decoders.process import Missing, environment
from infra import servers
from infra.servers import debian

RECORD = {"id": "a", "what": "w", "value": 1.0, "unit": "x", "against": "", "repeats": 1, "spread": 0.0}
GOOD = f"import sys, json; json.dump([{RECORD!r}], open(sys.argv[-1], 'w'))"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_failure_is_told_and_what_was_measured_is_there_after_each(tmp_path: Path) -> None:
    out, seen = tmp_path / "records.json", tmp_path / "seen.json"
    look = f"import shutil; shutil.copy({str(out)!r}, {str(seen)!r}); raise SystemExit(3)"
    commands = {"good": python(GOOD), "bad": python(look), "empty": python("pass"), "again": python(GOOD)}
    found, failed = every.collect(commands, out, 300)
    assert [record.id for record in found] == ["a", "a"]
    assert failed["bad"] == "ended with exit code 3; run it alone to see why"
    assert failed["empty"].startswith("wrote no records")
    assert json.loads(seen.read_text()) == [RECORD]
    assert records.read(out) == found


def test_past_its_limit_a_benchmark_is_ended_and_may_stop_what_it_started(tmp_path: Path) -> None:
    stopped = tmp_path / "stopped"
    code = f"import time\ntry: time.sleep(600)\nfinally: open({str(stopped)!r}, 'w')"
    assert every.failure(python(code), 5.0) == "not done within 0.0833 minutes, and ended"
    assert stopped.exists()
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    assert every.failure(python(deaf), 5.0, grace_s=0.1).startswith("not done within")


def test_where_the_records_cannot_be_written_nothing_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--json", str(tmp_path / "gone" / "records.json")]
    for begin in (every.main, lambda argv: records.Bench.start("", argv)):
        with pytest.raises(SystemExit) as ended:
            begin(arguments)
        assert ended.value.code == 2
        assert "there is no folder" in capsys.readouterr().err


def test_a_quick_look_installs_no_peer_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.decoders.process.ROOT", tmp_path)
    with pytest.raises(Missing, match="llama_cpp is not installed"):
        environment("llama_cpp", make=False)
    monkeypatch.setattr(debian, "CACHE", tmp_path)
    with (
        servers.only_what_is_here(),
        pytest.raises(servers.Unavailable, match="no-such: not here, and nothing is fetched"),
    ):
        debian.program("no-such-program", "no-such")
    servers.require_fetching("afterwards it may be")
    assert not list(tmp_path.iterdir())


def test_what_is_no_benchmark_is_not_run() -> None:
    names = every.names()
    assert "bus" in names
    assert "credit" in names
    assert not {"loop", "learning", "records", "all"} & set(names)
    for name in names:
        text = (Path(every.__file__).parent / f"{name}.py").read_text()
        assert "Bench.start(" in text
