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

from etude.study.checks import require_possible
from etude.study.command import app, etude
from etude.study.config import BadStudy, phase, read, written
from etude.study.report import linear_fit, markdown, plot
from etude.study.scaling import CommandFailed, Level, StudyStopped, run

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
    """Does what the commands would leave. `fails`: the first words of the command that fails. `states`: of the run, look by
    look."""

    def __init__(self, states: Sequence[str] = ("running", "finished")) -> None:
        self.said: list[list[str]] = []
        self.fails = ""
        self.states = states
        self.looks = 0

    def __call__(self, words: Sequence[str], state: Path) -> str:
        self.said.append(list(words))
        if self.fails and " ".join(words).startswith(self.fails):
            raise CommandFailed(words, state, 2, "what it printed")
        match list(words):
            case [*_, "--check"]:
                return ""
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
                state_now = self.states[self.looks % len(self.states)]
                self.looks += 1
                row = {"run": "r-1", "state": state_now, "reason": "why", "serial": 7, "step": 7}
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


@pytest.mark.parametrize(
    ("file", "text", "made", "changed"),
    [
        ("sft.toml", SFT + "[train]\nepochs = 2.0\n", "level-1/level.json", "sft.train"),
        ("study.toml", STUDY.replace("minutes = 2", "minutes = 3"), "level-1/level.json", "rl.minutes"),
    ],
)
def test_a_level_of_another_configuration_is_not_taken_for_this_one(
    folder: Path, file: str, text: str, made: str, changed: str
) -> None:
    run(read(folder / "study.toml"), Etude(), lambda text: None, lambda s: None)
    (folder / file).write_text(text)
    with pytest.raises(StudyStopped) as caught:
        run(read(folder / "study.toml"), Etude(), lambda text: None, lambda s: None)
    assert f"{made}: was made by another configuration; changed since: {changed}." in str(caught.value)


def test_a_phase_of_another_configuration_is_not_taken_for_this_one(folder: Path) -> None:
    etude = Etude()
    etude.fails = "train sft"
    with pytest.raises(StudyStopped):
        run(read(folder / "study.toml"), etude, lambda text: None, lambda s: None)
    made = (folder / "cpt.toml").read_text()
    (folder / "cpt.toml").write_text(made.replace("step_tokens = 10", "step_tokens = 20"))
    with pytest.raises(StudyStopped, match=r"level-1/cpt: was made by .* changed since: train.step_tokens\."):
        run(read(folder / "study.toml"), Etude(), lambda text: None, lambda s: None)
    (folder / "cpt.toml").write_text("# a comment\n" + made + "checkpoint_every = 3\n[machine]\nthreads = 2\n")
    etude = Etude()
    run(read(folder / "study.toml"), etude, lambda text: None, lambda s: None)
    assert names(etude.said)[0] == "train sft"


def test_a_loss_that_was_measured_otherwise_is_measured_again(folder: Path) -> None:
    etude = Etude()
    etude.fails = "up"
    with pytest.raises(StudyStopped):
        run(read(folder / "study.toml"), etude, lambda text: None, lambda s: None)
    (folder / "study.toml").write_text(STUDY.replace("[rl]", "window = 512\nstride = 256\n[rl]"))
    etude = Etude()
    run(read(folder / "study.toml"), etude, lambda text: None, lambda s: None)
    assert names(etude.said)[:2] == ["train evaluate-loss", "up"]
    assert "512" in etude.said[0]


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("level.json", '{"level"', "level.json: is damaged (JSONDecodeError: "),
        ("level.json", "{}", "level.json: is damaged (KeyError: 'config'); remove it"),
        ("loss.json", "[]", "loss.json: is damaged (AttributeError: "),
        ("loss.json", "{}", "loss.json: is damaged (ZeroDivisionError: "),
        ("cpt.toml", "=", "cpt.toml: says what made "),
    ],
)
def test_a_damaged_result_is_named_with_the_way_out(folder: Path, file: str, text: str, words: str) -> None:
    run(read(folder / "study.toml"), Etude(), lambda text: None, lambda s: None)
    level = folder / "out/level-1"
    if file != "level.json":
        (level / "level.json").unlink()
    (level / file).write_text(text)
    with pytest.raises(StudyStopped) as caught:
        run(read(folder / "study.toml"), Etude(), lambda text: None, lambda s: None)
    assert words in str(caught.value)


def test_a_folder_that_cannot_be_made_is_named(folder: Path) -> None:
    (folder / "out").write_text("a file")
    with pytest.raises(StudyStopped, match=f"{folder}/out.*: Not a directory. Mend it"):
        run(read(folder / "study.toml"), Etude(), lambda text: None, lambda s: None)


def test_each_pause_of_a_run_is_said_once(folder: Path) -> None:
    said = list[str]()
    etude = Etude(("paused", "paused", "running", "paused", "finished"))
    run(read(folder / "study.toml"), etude, said.append, lambda s: None)
    assert [text for text in said if "paused" in text] == [
        f"level-{n}: the run is paused (why); `etude resume --state {folder}/out/level-{n}/state` goes on"
        for n in (1, 1, 2, 2, 3, 3)
    ]


@pytest.mark.parametrize("answer", ["", "[]", "[1]", "nothing", '[{"state": "running"}, {"state": "running"}]'])
def test_an_answer_that_names_no_run_stops_the_study_and_its_platform(folder: Path, answer: str) -> None:
    etude = Etude()

    def command(words: Sequence[str], state: Path) -> str:
        said = etude(words, state)
        return answer if words[0] == "runs" else said

    with pytest.raises(StudyStopped, match="allowed: one run"):
        run(read(folder / "study.toml"), command, lambda text: None, lambda s: None)
    assert names(etude.said)[-1] == "down"


def test_a_platform_that_does_not_end_hides_no_other_error(folder: Path) -> None:
    etude, said = Etude(), list[str]()

    def command(words: Sequence[str], state: Path) -> str:
        etude.fails = words[0] if words[0] in ("start", "down") else ""
        return etude(words, state)

    with pytest.raises(StudyStopped, match="etude start"):
        run(read(folder / "study.toml"), command, said.append, lambda s: None)
    assert said[-1].startswith("level-1: its platform goes on: etude down")


def test_every_stage_is_checked_by_its_own_command_and_nothing_is_written(folder: Path) -> None:
    etude = Etude()
    require_possible(read(folder / "study.toml"), etude)
    assert names(etude.said) == ["train cpt", "train sft", "train evaluate-loss", "start"]
    assert {words[-1] for words in etude.said} == {"--check"}
    assert etude.said[2][2] == str(folder / "base")  # SFT's own checkpoint is not there yet
    assert sorted(path.name for path in folder.iterdir()) == ["cpt.toml", "sft.toml", "study.toml"]


@pytest.mark.parametrize(
    ("stage", "named"), [("train cpt", "cpt {}/cpt.toml"), ("train sft", "sft {}/sft.toml"), ("start", "rl")]
)
def test_what_a_stage_refuses_is_known_before_the_first_is_trained(folder: Path, stage: str, named: str) -> None:
    etude = Etude()
    etude.fails = stage
    with pytest.raises(BadStudy) as caught:
        require_possible(read(folder / "study.toml"), etude)
    assert str(caught.value).startswith(f"{named.format(folder)}: `etude {stage}")
    assert str(caught.value).endswith("what it printed")


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
        ('held_out = ["held-out"]', "", "measure.held_out: found nothing; allowed: a value"),
        ('pack = "pack"', 'retry = "afresh"', "rl.retry: found 'afresh'; allowed: "),
        ("[rl]", "window = 8\nstride = 9\n[rl]", "measure.stride: found 9; allowed: 1 to measure.window, 8"),
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


@pytest.mark.parametrize("options", [[], ["--check"]])
def test_a_checkpoint_that_is_not_there_is_refused_by_the_real_command(folder: Path, options: list[str]) -> None:
    done = CliRunner().invoke(app, ["scaling", str(folder / "study.toml"), *options])
    assert done.exit_code == 2
    assert f"cpt {folder}/cpt.toml: `etude train cpt` refuses it:" in done.stderr
    assert f"{folder / 'base'}" in done.stderr
    assert not (folder / "out").exists()


def test_a_command_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed) as caught:
        etude(["train", "cpt", str(tmp_path / "none.toml")], tmp_path, shown=False)
    assert f"etude train cpt {tmp_path}/none.toml (ETUDE_STATE={tmp_path}) ended with exit code 2:" in str(caught.value)
    assert caught.value.printed == f"train: {tmp_path}/none.toml: cannot be read: No such file or directory"


def test_a_phase_whose_table_is_none_is_refused(folder: Path) -> None:
    (folder / "cpt.toml").write_text('checkpoint = "base"\nout = "x"\ntrain = 3\n')
    with pytest.raises(BadStudy, match=r"cpt\.toml: train: found 3; allowed: a table"):
        phase(folder / "cpt.toml", out=folder, tokens=9)


LEVELS = [
    Level(n, loss, 0.1, after, (after - 0.05, after + 0.05), 9, "r")
    for n, loss, after in ((10, 2.0, 0.2), (20, 1.5, 0.3), (40, 1.0, 0.4))
]


def test_the_table_says_what_a_lower_loss_was_worth() -> None:
    found = linear_fit(LEVELS)
    assert found is not None
    assert (found.slope, found.intercept, found.r2) == pytest.approx((-0.2, 0.6, 1.0))
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
    assert phase(folder / "sft.toml", out=folder / "o", checkpoint=folder / "c") == {
        "checkpoint": str(folder / "c"),
        "out": str(folder / "o"),
        "data": {"trajectories": ["file:/store#r-1"]},
    }
    with pytest.raises(BadStudy):
        phase(folder / "none.toml", out=folder)
