"""A rank that is killed costs nothing: the run goes on from its checkpoint, and its weights are those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_processes import run_ranks

pytestmark = pytest.mark.timeout(2000)  # see rank_processes.DEADLINE_S
STEPS, RANKS = 3, 2
SCRIPT = Path(__file__).with_name("ranks_of_a_run.py")
OPENING = Path(__file__).with_name("ranks_that_open.py")


def run(folder: Path, kill: str = "") -> list[str]:
    """Run the ranks until they are through, as a launcher does: when one has died, all of them are started again. Return what
    the leader said."""
    folder.mkdir()
    for _ in range(3):
        ended = run_ranks(SCRIPT, [str(folder), str(STEPS)], RANKS, KILL=kill)
        codes = [rank.code for rank in ended]
        if codes == [0] * RANKS:
            break
        assert kill, ended
        assert codes[int(kill.split()[0])] == -9, ended
        assert codes.count(-9) == 1, "a rank waited for one that had died"
        kill = ""
    else:
        pytest.fail("the ranks did not get through")
    return (folder / "said").read_text().splitlines()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return run(tmp_path_factory.mktemp("ranks") / "run")


def check(undisturbed: list[str], folder: Path, kill: str) -> None:
    said = run(folder, kill)
    steps = dict(line.split() for line in said)
    assert steps == dict(line.split() for line in undisturbed)  # bit-equal, whichever step was made again
    assert sorted(map(int, steps)) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("kill", ["0 3", "1 9"])
def test_a_run_survives_the_death_of_any_rank(undisturbed: list[str], kill: str, tmp_path: Path) -> None:
    check(undisturbed, tmp_path / "run", kill)


@pytest.mark.nightly
@pytest.mark.parametrize("call", range(1, 21))
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_survives_it_at_every_point(undisturbed: list[str], rank: int, call: int, tmp_path: Path) -> None:
    check(undisturbed, tmp_path / "run", f"{rank} {call}")


@pytest.mark.parametrize("hurt", ["0 fails", "0 dies", "1 fails"])
def test_no_rank_waits_for_one_that_failed_before_the_engine_was_built(hurt: str, tmp_path: Path) -> None:
    ended = run_ranks(OPENING, [str(tmp_path)], RANKS, HURT=hurt)
    failed = int(hurt[0])
    if hurt.endswith("dies"):
        assert (ended[failed].code, ended[1 - failed].code) == (-9, 3), ended
        return
    assert [rank.code for rank in ended] == [3, 3], ended
    assert "OSError: the store is away" in ended[failed].said
    assert f"RankFailed: rank {failed}: OSError: the store is away" in ended[1 - failed].said
