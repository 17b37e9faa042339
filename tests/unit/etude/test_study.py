"""`etude study scaling`: its stages as commands, what an interruption leaves, its table, and what it refuses."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from etude.study import scaling
from etude.study.command import app
from etude.study.config import BadStudy, phase, read, written
from etude.study.report import line, markdown, plot
from etude.study.scaling import Level, StudyStopped, run

STUDY = """
out = "out"
levels = [1000, 4000, 16000]
cpt = "cpt.toml"
sft = "sft.toml"
[measure]
held_out = ["held-out"]
[rl]
minutes = 2
pack = "pack"
"""
CPT = 'checkpoint = "base"\nout = "x"\n[data]\ntokens = ["tokens"]\n[train]\nstep_tokens = 10\n'
SFT = 'checkpoint = "y"\nout = "x"\n[data]\ntrajectories = ["file:/store#r-1"]\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("study.toml", STUDY), ("cpt.toml", CPT), ("sft.toml", SFT)):
        (tmp_path / name).write_text(text)
    return tmp_path


class Etude:
    """Does what the commands would leave. `fails`: the first words of the command that fails."""

    def __init__(self) -> None:
        self.said: list[list[str]] = []
        self.fails = ""
        self.looks = 0

    def __call__(self, words: Sequence[str], state: Path) -> str:
        self.said.append(list(words))
        if self.fails and " ".join(words).startswith(self.fails):
            raise StudyStopped(f"etude {' '.join(words)} failed")
        match list(words):
            case ["train", "cpt" | "sft", file]:
                told = tomllib.loads(Path(file).read_text())
                out = Path(told["out"])
                out.mkdir(parents=True)
                (out / "config.json").write_text(json.dumps(told))
            case ["train", "evaluate-loss", checkpoint, *_, "--json", file]:
                before = json.loads((Path(checkpoint) / "config.json").read_text())["checkpoint"]
                tokens = json.loads((Path(before) / "config.json").read_text())["train"]["tokens"]
                loss = 3.0 - tokens / 10_000
                Path(file).write_text(
                    json.dumps(
                        {"a": {"nats_per_token": loss, "tokens": 30}, "b": {"nats_per_token": 1.0, "tokens": 10}}
                    )
                )
            case ["up", *_]:
                state.mkdir(parents=True)
            case ["runs", "--json"]:
                self.looks += 1
                ended = self.looks % 2 == 0
                row = {"run": "r-1", "state": "finished" if ended else "running", "reason": "", "serial": 7, "step": 7}
                return json.dumps([row])
            case ["measure", _, "--versions", "0,7", *_, "--json", file]:
                figures = [{"pass_at_1": 0.1, "ci95": [0.0, 0.2]}, {"pass_at_1": 0.25, "ci95": [0.2, 0.3]}]
                Path(file).write_text(
                    json.dumps([{"version": v, "figures": f} for v, f in zip((0, 7), figures, strict=True)])
                )
        return ""


def names(said: Sequence[Sequence[str]]) -> list[str]:
    return [" ".join(words[:2]) if words[0] == "train" else words[0] for words in said]


ONE = ["train cpt", "train sft", "train evaluate-loss", "up", "import", "start", "runs", "runs", "measure", "down"]


def test_every_level_goes_through_the_same_stages_and_differs_in_its_pretraining_alone(folder: Path) -> None:
    etude, slept = Etude(), list[float]()
    levels = run(read(folder / "study.toml"), etude, lambda text: None, slept.append)
    assert names(etude.said) == ONE * 3
    assert [one.tokens for one in levels] == [1000, 4000, 16000]
    assert levels[0] == Level(1000, pytest.approx((2.9 * 30 + 10) / 40), 0.1, 0.25, (0.2, 0.3), 7, "r-1")  # type: ignore[arg-type]
    made = [tomllib.loads((folder / f"out/level-{n}/cpt.toml").read_text()) for n in (1, 2, 3)]
    assert [one["train"].pop("tokens") for one in made] == [1000, 4000, 16000]
    assert [Path(one.pop("out")) for one in made] == [folder / f"out/level-{n}/cpt" for n in (1, 2, 3)]
    assert made[0] == made[1] == made[2]
    assert made[0]["checkpoint"] == str(folder / "base")
    assert made[0]["data"]["tokens"] == [str(folder / "tokens")]
    start = next(words for words in etude.said if words[0] == "start")
    assert start[start.index("--pack") + 1] == str(folder / "pack")


@pytest.mark.parametrize("stage", ["train cpt", "train sft", "train evaluate-loss", "start", "measure"])
def test_after_a_failure_the_same_command_goes_on_with_the_stage_that_failed(folder: Path, stage: str) -> None:
    etude = Etude()
    etude.fails = stage
    with pytest.raises(StudyStopped, match=f"etude {stage}"):
        run(read(folder / "study.toml"), etude, lambda text: None, lambda s: None)
    if "start" in names(etude.said):
        assert names(etude.said)[-1] == "down"  # no service outlives the study
    etude.fails, etude.said, etude.looks = "", [], 0
    run(read(folder / "study.toml"), etude, lambda text: None, lambda s: None)
    left = names(etude.said)
    practice = ["down", *ONE[3:]] if stage in ("start", "measure") else ONE[ONE.index(stage) :]
    assert left == [*practice, *ONE, *ONE]
    etude.said = []
    run(read(folder / "study.toml"), etude, lambda text: None, lambda s: None)
    assert not etude.said


def test_a_level_of_another_configuration_is_not_taken_for_this_one(folder: Path) -> None:
    run(read(folder / "study.toml"), Etude(), lambda text: None, lambda s: None)
    (folder / "sft.toml").write_text(SFT + "[train]\nepochs = 2.0\n")
    with pytest.raises(StudyStopped, match="was made by another configuration; give the study another `out`"):
        run(read(folder / "study.toml"), Etude(), lambda text: None, lambda s: None)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('out = "out"', "", "out: found nothing; allowed: a value"),
        ("[1000, 4000, 16000]", "[4000, 1000]", "levels: found [4000, 1000]; allowed: two or more, each larger"),
        ("[1000, 4000, 16000]", "[0, 10]", "levels: found 0; allowed: 1 to "),
        ("minutes = 2", "minutes = -2", "rl.minutes: found -2.0; allowed: more than 0"),
        ("minutes = 2", "minuets = 2", "rl.minuets"),
        ('held_out = ["held-out"]', "held_out = []", "measure.held_out: found none; allowed: one folder or more"),
        ('pack = "pack"', 'pack = "pack"\nproblems = "p.jsonl"', "rl.problems: found a file beside rl.pack"),
        ('cpt = "cpt.toml"', 'cpt = "none.toml"', "none.toml: cannot be read: No such file or directory"),
        ("levels", "levels =", "no TOML"),
    ],
)
def test_a_study_that_cannot_be_is_refused_and_writes_nothing(
    folder: Path, before: str, after: str, words: str
) -> None:
    (folder / "study.toml").write_text(STUDY.replace(before, after))
    done = CliRunner().invoke(app, ["scaling", str(folder / "study.toml")])
    assert done.exit_code == 2
    assert words in done.stderr
    assert not (folder / "out").exists()


def test_a_command_that_fails_is_named_with_its_last_words(folder: Path) -> None:
    """The real command: the checkpoint of `cpt` is not there."""
    done = CliRunner().invoke(app, ["scaling", str(folder / "study.toml")])
    assert done.exit_code == 1
    assert "etude train cpt" in done.stderr
    assert "ended with exit code 2" in done.stderr
    assert f"{folder / 'base'}" in done.stderr


LEVELS = [
    Level(n, loss, 0.1, after, (after - 0.05, after + 0.05), 9, "r")
    for n, loss, after in ((10, 2.0, 0.2), (20, 1.5, 0.3), (40, 1.0, 0.4))
]


def test_the_table_says_what_a_lower_loss_was_worth() -> None:
    found = line(LEVELS)
    assert found is not None
    assert (found.slope, found.at, found.r2) == pytest.approx((-0.2, 0.6, 1.0))
    text = markdown(LEVELS)
    assert "| 20 | 1.5000 | 10.0% | 30.0% | 25.0% to 35.0% | +20.0 | 9 |" in text
    assert (
        "A loss lower by 0.1 nats per token goes with +2.0 points of pass@1 after RL (R² 1.00 over 3 levels)." in text
    )
    assert "2 levels make no line" in markdown(LEVELS[:2])
    plot([*LEVELS, Level(80, 0.9, 0.1, 0.4, None, 9, "r")])


values = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.booleans(),
    st.text(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.lists(st.text(), max_size=3),
)
tables = st.recursive(
    st.dictionaries(st.text(), values, max_size=4),
    lambda inner: st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(tables)
def test_a_table_is_written_as_toml_that_reads_the_same(table: dict[str, object]) -> None:
    assert tomllib.loads(written(table)) == table


def test_a_phase_keeps_what_the_study_does_not_set(folder: Path) -> None:
    told = tomllib.loads(phase(folder / "sft.toml", out=folder / "o", checkpoint=folder / "c"))
    assert told == {
        "checkpoint": str(folder / "c"),
        "out": str(folder / "o"),
        "data": {"trajectories": ["file:/store#r-1"]},
    }
    with pytest.raises(BadStudy):
        phase(folder / "none.toml", out=folder)
    assert scaling.LOOK_S > 0
