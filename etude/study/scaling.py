"""The stages of a scaling study, level by level: each a command of `etude`, in a folder of its own.

Invariants:
- A stage that has left its result is not made again, so the same command goes on after an interruption. The phases go on from their
  own last state; a run that was interrupted begins again.
- Nothing but the amount of pretraining differs between two levels.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from etude.study.config import StudyConfig, phase
from shared.contracts.life import RunState
from shared.output import write_whole
from shared.settings import Told

LOOK_S = 2.0  # between two looks at the run
BASE = "study"

Command = Callable[[Sequence[str], Path], str]
"""Runs `etude` with the words, the folder as its state; returns what it printed. Raises StudyStopped where it fails."""


class StudyStopped(Told, RuntimeError):
    """A stage failed; the text says which one and the way out."""


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
    """Make every level that is not there yet, and return all. Raises StudyStopped, BadStudy, OSError."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    levels = []
    for number, tokens in enumerate(config.levels, 1):
        levels.append(Work(config, tokens, out / f"level-{number}", command, say, sleep).level())
    return levels


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
        kept = self.folder / "level.json"
        wanted = self._told()
        if kept.exists():
            found = json.loads(kept.read_text())
            if found["told"] != wanted:
                raise StudyStopped(
                    f"{kept}: was made by another configuration; give the study another `out`, or remove {self.folder}"
                )
            return _level(found["level"])
        cpt, sft = self.folder / "cpt", self.folder / "sft"
        self._phase("cpt", cpt, phase(Path(self.config.cpt), out=cpt, tokens=self.tokens))
        self._phase("sft", sft, phase(Path(self.config.sft), out=sft, checkpoint=cpt))
        loss = self._loss(sft)
        level = self._practised(sft, loss)
        write_whole(kept, json.dumps({"told": wanted, "level": asdict(level)}, indent=2) + "\n")
        return level

    def _told(self) -> dict[str, Any]:
        """Return all that decides the level's figures, as the files say it now."""
        config = self.config
        texts = {name: Path(file).read_text() for name, file in (("cpt", config.cpt), ("sft", config.sft)) if file}
        own = Path(config.rl.config).read_text() if config.rl.config else ""
        measure = msgspec.structs.asdict(config.measure)
        rl = {**msgspec.structs.asdict(config.rl), "text": own}
        return {"tokens": self.tokens, **texts, "rl": rl, "measure": measure}

    def _phase(self, name: str, out: Path, text: str) -> None:
        if (out / "config.json").exists():
            return
        self._say(f"{name}, {self.tokens:,} tokens" if name == "cpt" else name)
        file = self.folder / f"{name}.toml"
        write_whole(file, text)
        self.command(["train", name, str(file)], self.state)

    def _loss(self, checkpoint: Path) -> float:
        file = self.folder / "loss.json"
        if not file.exists():
            self._say("loss on held-out code")
            data = [word for folder in self.config.measure.held_out for word in ("--data", folder)]
            own = self.config.measure
            words = ["train", "evaluate-loss", str(checkpoint), *data, "--tokens", str(own.tokens)]
            words += ["--window", str(own.window), "--stride", str(own.stride)]
            self.command([*words, "--json", str(file)], self.state)
        found = json.loads(file.read_text()).values()
        return sum(one["nats_per_token"] * one["tokens"] for one in found) / sum(one["tokens"] for one in found)

    def _practised(self, checkpoint: Path, loss: float) -> Level:
        """Run RL from the checkpoint on a platform of its own, and measure its first and its last version."""
        rl, measure = self.config.rl, self.config.measure
        if self.state.exists():  # of a run that was interrupted
            self.command(["down"], self.state)
            shutil.rmtree(self.state)
        self.command(["up", "--detach", "--base-port", "0"], self.state)
        try:
            self.command(["import", str(checkpoint), "--name", BASE], self.state)
            words = ["start", "--base", BASE, "--minutes", str(rl.minutes), "--steps", str(rl.steps)]
            words += ["--seed", str(rl.seed), "--retry", rl.retry]
            for option in ("pack", "problems", "config"):
                words += [f"--{option}", value] if (value := getattr(rl, option)) else []
            self._say(f"RL, {rl.minutes:g} minutes")
            self.command(words, self.state)
            ended = self._until_ended()
            self._say(f"measured at version 0 and {ended['serial']}")
            file = self.folder / "measured.json"
            versions = sorted({0, int(ended["serial"])})
            words = [
                "measure",
                ended["run"],
                "--versions",
                ",".join(map(str, versions)),
                "--problems",
                str(measure.problems),
            ]
            self.command([*words, "--samples", str(measure.samples), "--json", str(file)], self.state)
        finally:
            self.command(["down"], self.state)
        rows = {row["version"]: row["figures"] for row in json.loads(file.read_text())}
        before, after = rows[versions[0]], rows[versions[-1]]
        interval = tuple(after["ci95"]) if after.get("ci95") else None
        return Level(
            self.tokens, loss, before["pass_at_1"], after["pass_at_1"], interval, int(ended["step"]), ended["run"]
        )

    def _until_ended(self) -> dict[str, Any]:
        """Wait for the run's end and return its row of `etude runs --json`. Raises StudyStopped where it can come to none."""
        told = ""
        while True:
            (row,) = json.loads(self.command(["runs", "--json"], self.state))
            if row["state"] == RunState.finished:
                return dict(row)
            if row["state"] == RunState.paused and row["reason"] != told:
                told = row["reason"]
                self._say(f"the run is paused ({told}); `etude resume --state {self.state}` goes on")
            self.sleep(LOOK_S)


def _level(found: dict[str, Any]) -> Level:
    interval = found["interval"]
    return Level(**{**found, "interval": tuple(interval) if interval else None})
