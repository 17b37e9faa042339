from __future__ import annotations

import tracemalloc

import pytest
import zstandard

from shared.problems import Case, FunctionHidden, FunctionProblem, ProblemError, pack
from shared.problems.pack import read_hidden, read_problems, write

PROBLEMS = [
    FunctionProblem(id=f"p{i}", files={"f.py": f"def f(): return {i}"}, entry="f", visible=[]) for i in range(3000)
]
HIDDEN = [FunctionHidden(id=p.id, cases=[Case(args="[]", expected="1")]) for p in PROBLEMS]


def test_what_is_written_is_read_and_the_same_entries_give_the_same_bytes() -> None:
    assert read_problems(write(PROBLEMS)) == PROBLEMS
    assert read_hidden(write(HIDDEN)) == HIDDEN
    assert write(PROBLEMS) == write(PROBLEMS)
    assert read_problems(write([])) == []


def test_packs_may_be_joined_byte_by_byte() -> None:
    assert read_problems(write(PROBLEMS[:10]) + write(PROBLEMS[10:])) == PROBLEMS


def test_damage_is_refused_with_the_line() -> None:
    whole = write(PROBLEMS)
    for broken in (b"", b"junk", whole[:-1], whole[: len(whole) // 2], whole + b"x"):
        with pytest.raises(ProblemError, match="pack"):
            read_problems(broken)
    with pytest.raises(ProblemError, match="line 2"):
        read_hidden(zstandard.compress(b'{"id": "a", "cases": []}\n{"id": "b"}\n'))


@pytest.mark.parametrize("announced", [True, False])
def test_a_bomb_is_refused_before_it_is_unpacked(announced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "MAX_PACK_BYTES", 1 << 20)
    size = 1 << 29
    writer = zstandard.ZstdCompressor().compressobj(size=size if announced else -1)
    bomb = b"".join(writer.compress(bytes(1 << 24)) for _ in range(size >> 24)) + writer.flush()
    tracemalloc.start()
    try:
        with pytest.raises(ProblemError, match="pack of more than 1048576 bytes"):
            read_problems(write(PROBLEMS[:10]) + bomb)
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()
