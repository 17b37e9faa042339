"""Recorded attempts under another reward: what changes is said, and nothing is overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from services.reward import cli
from services.reward.rescore import BadConfig, Record, merged, rescored, summary
from shared.contracts.messages import Effort
from shared.contracts.run import LengthPenalty, RewardConfig
from tests.unit.reward.recorded import RIGHT, every_byte, record


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 500), st.integers(0, 3)), max_size=20),
    st.builds(RewardConfig, length=st.none() | st.builds(LengthPenalty, weight=st.floats(0, 1))),
)
def test_the_same_configuration_changes_nothing(drawn: list[tuple[bool, int, int]], config: RewardConfig) -> None:
    records = [
        record(f"a{i}", f"g{i // 4}", solved=solved, tokens=tokens, config=config, broken_tool_call=float(broken))
        for i, (solved, tokens, broken) in enumerate(drawn)
    ]
    found = summary(rescored(records, config))
    assert (found.changed, found.reordered, found.examples, found.missing) == (0, 0, [], {})
    assert found.signal[0] == found.signal[1]
    assert found.mean[0] == found.mean[1]


def test_a_new_weight_changes_rewards_orders_and_signals_and_says_whose() -> None:
    plain = RewardConfig(length=None, behaviour={})
    records = [
        record("a1", "g1", solved=True, config=plain, untested_submit=1.0),
        record("a2", "g1", solved=True, config=plain),
        record("a3", "g2", solved=True, config=plain),
        record("a4", "g2", solved=False, config=plain, untested_submit=1.0),
    ]
    found = summary(rescored(records, RewardConfig(id="new", length=None, behaviour={"untested_submit": -0.2})))
    assert (found.attempts, found.changed, found.groups, found.reordered) == (4, 1, 2, 1)
    assert found.signal == (1, 2)
    assert found.terms["untested_submit"] == (0, 1, 0.0, pytest.approx(-0.05))
    assert found.mean == pytest.approx((0.75, 0.7))
    assert [change.record.attempt for change in found.examples] == ["a1"]


def test_an_attempt_whose_verdict_is_gone_is_scored_without_its_terms_and_counted() -> None:
    gone = Record("a", "g", "p", 0, RIGHT, Effort(), 1.0, {"solved": 1.0}, "default", None)
    found = summary(rescored([gone], RewardConfig(length=None, behaviour={"no_submit": -0.1})))
    assert found.missing == {"no_submit": (1, "the verdict is not stored any more")}
    assert found.changed == 0


def test_changes_are_laid_over_the_runs_reward_and_wrong_ones_are_named() -> None:
    old = RewardConfig(behaviour={"no_submit": -0.1})
    assert merged(old, {"reward": {"behaviour": {"style": -0.2}}}).behaviour == {"no_submit": -0.1, "style": -0.2}
    assert merged(old, {"length": None}).length is None
    with pytest.raises(BadConfig, match=r"reward.behaviour.kindness'; allowed: broken_tool_call"):
        merged(old, {"reward": {"behaviour": {"kindness": 1.0}}})
    with pytest.raises(BadConfig, match=r"reward\.solved: found -1\.0; allowed"):
        merged(old, {"reward": {"solved": -1}})
    with pytest.raises(BadConfig, match=r"reward\.length\.weight: found 'much'"):
        merged(old, {"reward": {"length": {"weight": "much"}}})


# The commands, on a real ledger and store


def test_rescore_prints_what_changes_completes_terms_from_trajectories_and_overwrites_nothing(state: Path) -> None:
    (state / "new.toml").write_text("[reward.behaviour]\nbroken_tool_call = -0.5\nuntested_submit = -0.25\n")
    before = every_byte(state)
    options = ["--config", str(state / "new.toml"), "--state", str(state)]
    done = CliRunner().invoke(cli.alone, ["r-1", *options, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["attempts"] == 4
    assert found["changed"] == 2  # untested, and one of them with a broken call
    assert found["terms"]["untested_submit"][:2] == [0, 2]
    assert found["terms"]["broken_tool_call"][:2] == [1, 1]
    # An attempt that was not solved pays for no behaviour; its lost verdict is named all the same.
    assert found["missing"]["untested_submit"] == [1, "the verdict is not stored any more"]
    assert {path: data for path, data in every_byte(state).items() if path in before} == before

    out = state / "rows.jsonl"
    done = CliRunner().invoke(cli.alone, ["r-1", *options, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "2 of 4 rewards change" in " ".join(done.output.split())
    assert [json.loads(line)["attempt"] for line in out.read_text().splitlines()] == ["a0", "a1", "a2", "a3"]
    again = CliRunner().invoke(cli.alone, ["r-1", *options, "--out", str(out)])
    assert (again.exit_code, "it exists; allowed: a new file" in again.output) == (2, True)


@pytest.mark.parametrize(
    ("run", "text", "said"),
    [
        ("r-1", "[reward.behaviour]\nkindness = 1.0\n", "reward.behaviour.kindness'; allowed: broken_tool_call"),
        ("r-1", "[reward.behaviour\n", "not TOML"),
        ("r-9", "", "run: found 'r-9'; the ledger has r-1"),
    ],
)
def test_rescore_refuses_by_name(state: Path, run: str, text: str, said: str) -> None:
    (state / "new.toml").write_text(text)
    done = CliRunner().invoke(cli.alone, [run, "--config", str(state / "new.toml"), "--state", str(state)])
    assert done.exit_code == 2
    assert said in done.output


def test_reward_plot_draws_the_curve_of_a_run_and_of_a_file(state: Path) -> None:
    out = state / "curve.png"
    done = CliRunner().invoke(cli.app, ["plot", "r-1", "--state", str(state), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "4 attempts on the curve of reward configuration 'default'" in done.output
    assert out.read_bytes().startswith(b"\x89PNG")
    out.unlink()
    (state / "new.toml").write_text("[reward.length]\nq = 2.0\n")
    assert CliRunner().invoke(cli.app, ["plot", str(state / "new.toml"), "--out", str(out)]).exit_code == 0
    assert out.exists()
    (state / "none.json").write_text('{"reward": {"length": null}}')
    done = CliRunner().invoke(cli.app, ["plot", str(state / "none.json"), "--out", str(out)])
    assert (done.exit_code, "there is no penalty to draw" in done.output) == (2, True)
