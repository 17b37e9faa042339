"""A demo that fails or is stopped while it is set up: nothing is lost by it, and the same command begins again."""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from etude.demo import background, prepare
from etude.demo.options import DemoOptions
from etude.demo.prepare import DemoError
from etude.demo.run import LOCAL, Demo, run
from shared.settings import ServiceSettings, Told
from tests.end_to_end.problems import write
from tests.patience import eventually, patient

PAGE = Console(file=io.StringIO())


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    write(path)
    return path


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


def finished_demo(state: Path) -> dict[str, bytes]:
    """What an earlier demo left behind."""
    (state / "demo.json").write_text(json.dumps({"phase": "done", "run": "r-before"}))
    (state / "objects").mkdir()
    (state / "objects" / "old").write_bytes(b"of the demo before")
    return files(state)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def set_up(demo: Demo, **settings: str) -> None:
    asyncio.run(demo.set_up(ServiceSettings(state=demo.state, **settings)))


def options(state: Path, **given: Path | None) -> DemoOptions:
    return DemoOptions(state=state, uniform_sampling=True, **given)  # type: ignore[arg-type]


def test_a_slip_in_what_was_given_touches_no_demo_and_the_mended_call_begins(
    state: Path, problems: Path, tmp_path: Path
) -> None:
    before = finished_demo(state)
    broken = tmp_path / "broken.jsonl"
    broken.write_text(problems.read_text() + '{"id": "no files"}\n')
    with pytest.raises(DemoError, match=r"line \d+: field 'files': is missing"):
        set_up(Demo(options(state, problems=broken), PAGE))
    assert files(state) == before

    demo = Demo(options(state, problems=problems), PAGE)
    set_up(demo)
    assert demo.memory["phase"] == "before"
    (archived,) = (state / "archive").iterdir()
    assert files(archived) == before
    again = Demo(DemoOptions(state=state, resume=True), PAGE)
    again.recall()
    assert again.memory["run"] == demo.memory["run"]
    assert again.options.problems == problems
    assert "`etude demo --resume --state " in again.stopped()


def test_a_configuration_or_a_pack_that_is_none_touches_no_demo(state: Path, problems: Path, tmp_path: Path) -> None:
    before = finished_demo(state)
    slip = tmp_path / "slip.json"
    slip.write_text('{"train": {"learning_rat": 1}}')
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for split in ("rl", "held_out"):
        for part in ("public", "hidden"):
            (damaged / f"{split}.{part}.jsonl.zst").write_bytes(b"no zstd")
    for given, said in (
        ({"config": slip, "problems": problems}, r"train\.learning_rat"),
        ({"config": tmp_path / "missing.json", "problems": problems}, r"missing\.json"),
        ({"pack": tmp_path / "nowhere"}, r"rl\.public\.jsonl\.zst: missing"),
        ({"pack": damaged}, r"rl\.public\.jsonl\.zst: pack: no zstd data"),
        ({"problems": tmp_path / "nowhere.jsonl"}, r"nowhere\.jsonl"),
    ):
        with pytest.raises((DemoError, Told), match=said):
            set_up(Demo(options(state, **given), PAGE))
        assert files(state) == before


def test_a_set_up_that_failed_half_way_is_not_resumed_but_begun_again(state: Path, problems: Path) -> None:
    with pytest.raises(OSError):
        set_up(Demo(options(state, problems=problems), PAGE), objects="file:/proc/no-store-here")
    with pytest.raises(DemoError, match=r"set-up did not end; `etude demo --state .*` begins again"):
        Demo(DemoOptions(state=state, resume=True), PAGE).recall()

    demo = Demo(options(state, problems=problems), PAGE)
    assert demo.stopped().startswith("Stopped during set-up; `etude demo --state ")
    set_up(demo)
    assert demo.memory["phase"] == "before"


def test_a_set_up_that_was_stopped_does_not_become_a_demo_behind_the_users_back(
    state: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = Demo(options(state, problems=problems), PAGE)
    stopped, made = threading.Event(), prepare.new_run

    def new_run(*given: Any) -> Any:
        stopped.wait()
        return made(*given)

    monkeypatch.setattr(prepare, "new_run", new_run)

    async def stop_in_the_middle() -> None:
        task = asyncio.create_task(demo.set_up(ServiceSettings(state=state)))
        try:
            await eventually((state / "demo.json").exists)
            task.cancel()
        finally:
            stopped.set()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(stop_in_the_middle())  # the thread has ended when this returns
    assert json.loads((state / "demo.json").read_text()) == {"phase": "set-up"}


def test_what_other_commands_write_while_problems_are_made_stops_no_demo(
    state: Path, problems: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`etude import --name` stores a checkpoint in the same folder."""

    def ready(given: DemoOptions) -> DemoOptions:
        (state / "objects").mkdir()
        (state / "objects" / "mine").write_bytes(b"imported")
        return made(given)

    module = importlib.import_module("etude.demo.run")
    made = module.ready
    monkeypatch.setattr(module, "ready", ready)
    demo = Demo(options(state, problems=problems), PAGE)
    set_up(demo)
    assert demo.memory["phase"] == "before"
    assert (state / "objects" / "mine").read_bytes() == b"imported"


def test_a_demo_at_its_end_is_not_gone_on_with(state: Path) -> None:
    finished_demo(state)
    memory = json.loads((state / "demo.json").read_text())
    (state / "demo.json").write_text(json.dumps({**memory, "options": {"report": "mine.json"}}))
    with pytest.raises(
        DemoError, match=r"at its end, its figures are in mine\.json; `etude demo --state .*` begins another"
    ):
        Demo(DemoOptions(state=state, resume=True), PAGE).recall()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"staleness": 129}, "schedule.max_staleness: found 129; allowed: 0 to 128"),
        ({"group_size": 200}, "schedule.group_size: found 200; allowed: 2 to 128"),
        ({"groups_per_step": 2000}, "schedule.groups_per_step: found 2000; allowed: 1 to 1024"),
    ],
)
def test_what_no_scheduler_would_take_up_is_refused_before_anything_is_made(
    given: dict[str, int], said: str, state: Path, problems: Path
) -> None:
    with pytest.raises(DemoError, match=said):
        set_up(Demo(DemoOptions(state=state, problems=problems, **given), PAGE))  # type: ignore[arg-type]
    assert files(state) == {}


def test_another_platforms_folder_is_refused_before_anything_is_made(state: Path, problems: Path) -> None:
    (state / "bus.db").write_bytes(b"somebody's")
    with pytest.raises(DemoError, match="no demo; give another folder"):
        set_up(Demo(options(state, problems=problems), PAGE))
    assert files(state) == {"bus.db": b"somebody's"}


def test_an_error_shows_what_the_user_wrote_as_it_is(
    state: Path, problems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = json.loads(problems.read_text().splitlines()[0])
    slip = tmp_path / "slip.jsonl"
    slip.write_text(json.dumps({**first, "entry": "nothing_of_this_name"}) + "\n")
    assert run(DemoOptions(state=state, problems=slip, base_port=0)) == 1
    assert "field 'files[solution.py]': defines no function 'nothing_of_this_name'" in capsys.readouterr().out


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGINT)", "sys.exit(130)"])
def test_what_ctrl_c_ended_beside_us_is_no_failure(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal interrupts both, and the other may end first."""
    (tmp_path / "ends.py").write_text(f"import os, signal, sys\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n{end}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        background.call("ends")


def test_work_that_nobody_waits_for_any_more_ends_at_its_next_look() -> None:
    looks, ended = threading.Event(), threading.Event()

    def work() -> None:
        try:
            while True:
                background.require_wanted()
                looks.set()
        finally:
            ended.set()

    async def scenario() -> None:
        task = asyncio.create_task(background.in_thread(work))
        await asyncio.to_thread(looks.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(ended.wait, 30)

    asyncio.run(scenario())


def test_work_in_the_middle_of_a_long_wait_is_cancelled_and_clears_up_when_nobody_waits_for_it_any_more() -> None:
    begun, cleared, left = threading.Event(), threading.Event(), threading.Event()

    async def long() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cleared.set()

    def work() -> None:
        try:
            asyncio.run(background.wanted(long()))
        except KeyboardInterrupt:
            if cleared.is_set():
                left.set()

    async def scenario() -> None:
        task = asyncio.create_task(background.in_thread(work))
        assert await asyncio.to_thread(begun.wait, patient(30))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(left.wait, patient(30))

    asyncio.run(scenario())


TO_ALL = (signal.SIGINT, os.killpg)  # as a terminal does
ALONE = [(number, os.kill) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "send"), [TO_ALL, *ALONE])
def test_a_signal_while_problems_are_made_says_how_to_go_on_and_blocks_nothing(
    number: signal.Signals, send: Callable[[int, int], None], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "etude.cli", "demo", "--state", "here", "--base-port", "0"]
    demo = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # whoever runs the tests may ignore it (nohup)
    )
    try:
        deadline = time.monotonic() + patient(120)
        while not _children(demo.pid) and demo.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        maker = int(_children(demo.pid)[0])
        send(demo.pid, number)
        out, _ = demo.communicate(timeout=patient(60))
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
    assert demo.returncode == 130, out
    assert not Path(f"/proc/{maker}").exists()
    assert out.splitlines()[-1] == (
        "Stopped during set-up; `etude demo --state here` begins again, what is cached is kept."
    )
    assert not [name for name in LOCAL if (tmp_path / "here" / name).exists()]
    with pytest.raises(DemoError, match="no demo to resume here"):
        Demo(DemoOptions(state=tmp_path / "here", resume=True), PAGE).recall()


def _children(process: int) -> list[str]:
    found: list[str] = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            found += path.read_text().split()
        except OSError:  # a thread that has just ended
            continue
    return [child for child in found if b"services.curator" in _command(child)]


def _command(process: str) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""
