"""Which script a crowded session is blamed on, by what /proc shows of its processes at every look."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shared.sandbox.inside import sessions, tree
from shared.sandbox.inside.sessions import Session, _Script

KEEPER, SHELL, LIMIT = 10, 11, 64


def process(parent: int, started: int = 5) -> tree.Process:
    return tree.Process(parent=parent, started=started, threads=1, resident=1, zombie=False)


ALONE = {KEEPER: process(1, 1), SHELL: process(KEEPER, 2)}


def _no_pair(parent: int, child: int) -> None:
    raise FileNotFoundError


def orphans(count: int) -> dict[int, tree.Process]:
    return {**ALONE, **{100 + number: process(KEEPER) for number in range(count)}}


class Seen:
    """What /proc shows. `missed`: children that are gone before they can be looked at."""

    def __init__(self) -> None:
        self.table, self.missed = dict(ALONE), False

    def children(self, pid: int) -> list[int]:
        mine = [one for one, process in self.table.items() if process.parent == pid]
        return [*mine, 999] if self.missed and pid == KEEPER else mine


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    monkeypatch.setattr(tree, "read_below", lambda pid: dict(found.table))
    monkeypatch.setattr(tree, "children", found.children)
    monkeypatch.setattr(tree, "Pair", _no_pair)
    monkeypatch.setattr(tree, "send", lambda pids, number: None)
    monkeypatch.setattr(Session, "_drain", lambda self, at: None)
    monkeypatch.setattr(Session, "_type", lambda self, data: None)
    return found


def session(told: list[dict[str, Any]]) -> Session:
    made = Session.__new__(Session)
    made.loop = SimpleNamespace(crowd=LIMIT, kills=0, answer=lambda request, head, blob=b"": told.append(head))  # type: ignore[assignment]
    made.pid, made._ends, made._in, made._note = KEEPER, [], -1, b""
    made._spared, made._moving, made._restless = set(), False, False
    return made


def run(one: Session, number: int) -> _Script:
    one.run(number, {"script": 0, "keep": 100, "env": {}, "cwd": None, "time_s": 9.0}, b"")
    assert one._script is not None
    return one._script


def end(one: Session, script: _Script, code: int = 0) -> None:
    script.told = f"{script.mark} {code}\n".encode()
    one._told(script)


def test_a_script_is_not_blamed_for_a_bomb_that_no_look_had_caught(seen: Seen) -> None:
    """Processes that fork and end faster than they are read: at the end of the bomb's script none but one is in the table."""
    told: list[dict[str, Any]] = []
    one = session(told)
    script = run(one, 1)
    seen.table, seen.missed = orphans(1), True
    end(one, script, code=1)
    assert told[-1]["code"] == 1
    seen.table = dict(ALONE)
    innocent = run(one, 2)
    seen.table = orphans(60)
    end(one, innocent)
    assert (innocent.phase, innocent.code) == ("hard", 0)  # the session ends; the script keeps its own code


def test_a_script_is_blamed_for_its_own_crowd_orphans_too(seen: Seen) -> None:
    told: list[dict[str, Any]] = []
    one = session(told)
    script = run(one, 1)
    seen.table = orphans(60)
    end(one, script)
    assert (script.phase, script.cause, script.code) == ("hard", "process_limit", None)


@pytest.mark.parametrize("parent", [KEEPER, SHELL])
def test_a_script_is_blamed_for_a_crowd_that_is_only_just_one(seen: Seen, parent: int) -> None:
    """The look that finds the session full counts the shell, and so does the look for whose processes fill it."""
    told: list[dict[str, Any]] = []
    one = session(told)
    script = run(one, 1)
    full = int(LIMIT * sessions._CROWDED)
    seen.table = {**ALONE, **{100 + number: process(parent) for number in range(full - 1)}}
    end(one, script)
    assert (script.phase, script.cause, script.code) == ("hard", "process_limit", None)


def test_a_script_is_not_blamed_for_what_a_process_of_before_has_forked_since(seen: Seen) -> None:
    told: list[dict[str, Any]] = []
    one = session(told)
    script = run(one, 1)
    seen.table = orphans(1)
    end(one, script)
    innocent = run(one, 2)
    seen.table = {**orphans(1), **{200 + number: process(100) for number in range(60)}}
    end(one, innocent)
    assert (innocent.phase, innocent.code) == ("hard", 0)


def test_a_look_is_repeated_while_processes_come_and_go(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def read(pid: int) -> dict[int, tree.Process]:
        looks.append(pid)
        seen.missed = len(looks) < 3
        return orphans(2)

    monkeypatch.setattr(tree, "read_below", read)
    seen.table = orphans(2)
    one = session([])
    assert not one._crowded()
    assert (len(looks), one._moving) == (3, False)
    assert sessions._READS > 3
