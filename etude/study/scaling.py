"""The stages of a scaling study, level by level: each a command of `etude`, in a folder of its own.

Invariants:
- A stage that has left its result is not made again, so the same command goes on after an interruption. The phases go on from their
  own last state; a run that was interrupted begins again.
- A result is taken only for the configuration that it was made with. Each stage's configuration lies beside its result.
- Nothing but the amount of pretraining differs between two levels.
"""

from __future__ import annotations

import json
import shutil
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from etude.study.config import BadStudy, Measure, Rl, StudyConfig, decisive, phase, written
from shared.contracts.life import RunState
from shared.output import write_whole
from shared.settings import Told
from shared.visible import visible

LOOK_S = 15.0  # seconds between two looks at the run; a look starts a process
BASE = "study"

Command = Callable[[Sequence[str], Path], str]
"""Runs `etude` with the words, the folder as its state; returns what it printed. Raises CommandFailed."""


class StudyStopped(Told, RuntimeError):
    """A stage failed; the text says which one and the way out."""


class CommandFailed(StudyStopped):
    """A command of `etude` ended with an exit code other than 0. `printed`: its last lines."""

    def __init__(self, words: Sequence[str], state: Path, code: int, printed: str) -> None:
        self.printed = printed
        super().__init__(
            f"etude {' '.join(words)} (ETUDE_STATE={state}) ended with exit code {code}:\n{printed}\n"
            "Mend it; the same `etude study` goes on from there"
        )


@dataclass(frozen=True, slots=True)
class Level:
    """`loss`: nats per token on the held-out folders after SFT, over all their tokens. `before`, `after`: pass@1 of the first and
    the last version of the run. `interval`: the 95 % interval of `after`; None: it has none."""

    tokens: int
    loss: float
    before: float
    after: float
    interval: tuple[float, float] | None
    steps: int
    run: str


def run(
    config: StudyConfig, command: Command, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
) -> list[Level]:
    """Make every level that is not there yet, and return all. Raises StudyStopped, BadStudy, NotWritable."""
    out = Path(config.out)
    try:
        return [
            Work(config, tokens, out / f"level-{number}", command, say, sleep).level()
            for number, tokens in enumerate(config.levels, 1)
        ]
    except OSError as error:
        raise StudyStopped(
            f"{error.filename or out}: {error.strerror}. Mend it; the same `etude study` goes on from there"
        ) from error


def finished(config: StudyConfig) -> bool:
    """Return whether every level has left its figures."""
    return all((Path(config.out) / f"level-{n}" / "level.json").exists() for n in range(1, len(config.levels) + 1))


def start_words(rl: Rl) -> list[str]:
    """Return `etude start` for a level's run, without its base."""
    words = ["start", "--minutes", str(rl.minutes), "--steps", str(rl.steps)]
    words += ["--seed", str(rl.seed), "--retry", rl.retry]
    for option in ("pack", "problems", "config"):
        words += [f"--{option}", value] if (value := getattr(rl, option)) else []
    return words


def loss_words(measure: Measure, checkpoint: Path) -> list[str]:
    """Return `etude train evaluate-loss` of a checkpoint on the held-out folders."""
    data = [word for folder in measure.held_out for word in ("--data", folder)]
    words = ["train", "evaluate-loss", str(checkpoint), *data, "--tokens", str(measure.tokens)]
    return [*words, "--window", str(measure.window), "--stride", str(measure.stride)]


@dataclass(frozen=True, slots=True)
class Work:
    """One level, in `folder`."""

    config: StudyConfig
    tokens: int
    folder: Path
    command: Command
    say: Callable[[str], None]
    sleep: Callable[[float], None]

    def _say(self, text: str) -> None:
        self.say(f"{self.folder.name}: {text}")

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def level(self) -> Level:
        self.folder.mkdir(parents=True, exist_ok=True)
        cpt, sft = self.folder / "cpt", self.folder / "sft"
        pretraining = phase(Path(self.config.cpt), out=cpt, tokens=self.tokens)
        tuning = phase(Path(self.config.sft), out=sft, checkpoint=cpt)
        own = {
            "cpt": decisive(pretraining),
            "sft": decisive(tuning),
            "measure": msgspec.to_builtins(self.config.measure),
            "rl": msgspec.to_builtins(self.config.rl),
            "rl.config": _text(self.config.rl.config),
        }
        kept = self.folder / "level.json"
        if kept.exists():
            return _level(kept, own)
        self._phase("cpt", cpt, pretraining)
        self._phase("sft", sft, tuning)
        loss = self._loss(sft)
        level = self._practised(sft, loss)
        write_whole(kept, json.dumps({"config": own, "level": asdict(level)}, indent=2, default=str) + "\n")
        return level

    def _phase(self, name: str, out: Path, table: dict[str, Any]) -> None:
        """Train one phase, unless its checkpoint is there. Raises StudyStopped where another configuration made that."""
        file = self.folder / f"{name}.toml"
        if (out / "config.json").exists():
            if changed := _changed(decisive(table), _kept(file)):
                raise _other(out, changed, f"remove {out}{' and ' + str(out.parent / 'sft') if name == 'cpt' else ''}")
            return
        self._say(f"{name}, {self.tokens:,} tokens" if name == "cpt" else name)
        write_whole(file, written(table))
        self.command(["train", name, str(file)], self.state)

    def _loss(self, checkpoint: Path) -> float:
        """Return the loss on the held-out folders. A loss that was measured otherwise is measured again."""
        file, beside = self.folder / "loss.json", self.folder / "loss.words.json"
        words = loss_words(self.config.measure, checkpoint)
        if not beside.exists() or beside.read_text() != json.dumps(words):
            file.unlink(missing_ok=True)
            write_whole(beside, json.dumps(words))
        if not file.exists():
            self._say("loss on held-out code")
            self.command([*words, "--json", str(file)], self.state)
        with _reads(file):
            found = json.loads(file.read_bytes()).values()
            tokens = sum(one["tokens"] for one in found)
            return float(sum(one["nats_per_token"] * one["tokens"] for one in found) / tokens)

    def _practised(self, checkpoint: Path, loss: float) -> Level:
        """Run RL from the checkpoint on a platform of its own, and measure its first and its last version."""
        rl, measure = self.config.rl, self.config.measure
        if self.state.exists():  # of a run that was interrupted
            self.command(["down"], self.state)
            shutil.rmtree(self.state)
        self.command(["up", "--detach", "--base-port", "0"], self.state)
        try:
            self.command(["import", str(checkpoint), "--name", BASE], self.state)
            self._say(f"RL, {rl.minutes:g} minutes")
            self.command([*start_words(rl), "--base", BASE], self.state)
            ended = self._until_ended()
            self._say(f"measured at version 0 and {ended['serial']}")
            file = self.folder / "measured.json"
            versions = sorted({0, int(ended["serial"])})
            words = ["measure", ended["run"], "--versions", ",".join(map(str, versions))]
            words += ["--problems", str(measure.problems), "--samples", str(measure.samples), "--json", str(file)]
            self.command(words, self.state)
        finally:
            self._down()
        with _reads(file):
            rows = {row["version"]: row["figures"] for row in json.loads(file.read_bytes())}
            before, after = rows[versions[0]], rows[versions[-1]]
            interval = tuple(after["ci95"]) if after.get("ci95") else None
            return Level(
                self.tokens, loss, before["pass_at_1"], after["pass_at_1"], interval, int(ended["step"]), ended["run"]
            )

    def _down(self) -> None:
        """End the level's platform. One that cannot be ended is named, and hides no other error."""
        try:
            self.command(["down"], self.state)
        except StudyStopped as error:
            self._say(f"its platform goes on: {error}")

    def _until_ended(self) -> dict[str, Any]:
        """Wait for the run's end and return its row of `etude runs --json`. Says once for each pause that it is one. Raises
        StudyStopped where the answer names no run."""
        paused = False
        while True:
            text = self.command(["runs", "--json"], self.state)
            try:
                (row,) = json.loads(text)
                state = row["state"]
            except (ValueError, TypeError, KeyError):
                raise StudyStopped(
                    f"etude runs --json (ETUDE_STATE={self.state}): found {visible(text.strip())[:200] or 'nothing'}; allowed: "
                    "one run. The same `etude study` begins this level's run again"
                ) from None
            if state == RunState.finished:
                return dict(row)
            if state == RunState.paused and not paused:
                self._say(f"the run is paused ({row['reason']}); `etude resume --state {self.state}` goes on")
            paused = state == RunState.paused
            self.sleep(LOOK_S)


def _level(kept: Path, own: dict[str, Any]) -> Level:
    """Read a finished level. Raises StudyStopped where it is damaged or another configuration made it."""
    with _reads(kept):
        found = json.loads(kept.read_bytes())
        if changed := _changed(own, found["config"]):
            raise _other(kept, changed, f"remove {kept.parent}")
        level = found["level"]
        return Level(**{**level, "interval": tuple(level["interval"]) if level["interval"] else None})


def _changed(now: Any, before: Any, name: str = "") -> list[str]:
    """Return the names of the fields that differ. Values are compared as JSON holds them."""
    if isinstance(now, dict) and isinstance(before, dict):
        fields = [*now, *(field for field in before if field not in now)]
        return [
            changed
            for field in fields
            for changed in _changed(now.get(field), before.get(field), f"{name}.{field}" if name else field)
        ]
    return [] if json.dumps(now, default=str) == json.dumps(before, default=str) else [name]


def _other(made: Path, changed: Sequence[str], way_out: str) -> StudyStopped:
    return StudyStopped(
        f"{made}: was made by another configuration; changed since: {', '.join(changed)}. Give the study another `out`, or "
        f"{way_out}"
    )


def _kept(file: Path) -> dict[str, Any]:
    """Return what decided a stage's result, as the study wrote it beside it. Raises StudyStopped."""
    try:
        return decisive(tomllib.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise StudyStopped(
            f"{file}: says what made {file.with_suffix('')}, and cannot be read: {error}; remove {file.with_suffix('')} too"
        ) from None


@contextmanager
def _reads(file: Path) -> Iterator[None]:
    """Name a file of the study that does not hold what a command wrote there. Raises StudyStopped."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise StudyStopped(
            f"{file}: is damaged ({type(error).__name__}: {error}); remove it, and the same `etude study` makes it again"
        ) from error


def _text(path: str | None) -> str:
    """Return a run's configuration as its file says it. Raises BadStudy."""
    try:
        return Path(path).read_text() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise BadStudy(f"rl.config: {path}: cannot be read: {error}") from None
