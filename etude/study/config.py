"""The configuration of a scaling study: a TOML file, checked field by field before anything is written."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from shared.contracts.allowed import Length, Number, objections, shown, unfit
from shared.contracts.run import Retry
from shared.settings import Told

Place = Annotated[str, Length(4096)]
Levels = Annotated[list[int], Number(least=1, most=10**15)]
_PATHS = ("checkpoint", "out")
_DATA_PATHS = ("tokens", "conversations", "held_out", "held_out_conversations")


class BadStudy(Told, ValueError):
    """The study cannot begin. A line for each field: its name, what was found, what is allowed."""


class Rl(msgspec.Struct, frozen=True, kw_only=True):
    """The run of every level: as `etude start` takes it. Neither `pack` nor `problems`: the pack of this folder (.cache/pack)."""

    minutes: Annotated[float, Number(above=0, most=10_000)] = 10.0
    steps: Annotated[int, Number(least=0, most=10**9, zero="by time alone")] = 0
    seed: Annotated[int, Number(least=0, most=2**63 - 1)] = 1
    pack: Place | None = None
    problems: Place | None = None
    config: Place | None = None
    retry: Retry = "fresh"


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """`held_out`: folders of tokens, for the loss after SFT. `problems`, `samples`: of each measurement before and after RL."""

    held_out: list[Place]
    window: Annotated[int, Number(least=2, most=2**24)] = 2048  # as of `etude train evaluate-loss`
    stride: Annotated[int, Number(least=1, most=2**24)] = 1024
    tokens: Annotated[int, Number(least=0, most=10**12, zero="all")] = 0
    problems: Annotated[int, Number(least=0, most=10**7, zero="all")] = 400
    samples: Annotated[int, Number(least=1, most=1000)] = 8


class StudyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`levels`: targets of continued pretraining, each from the checkpoint that `cpt` names. `cpt`, `sft`: configurations of those
    phases; the study sets their `out`, `train.tokens` of cpt, and `checkpoint` of sft. `out`: the study's own folder."""

    out: Place
    levels: Levels
    cpt: Place
    sft: Place
    measure: Measure
    rl: Rl = Rl()


def read(path: Path) -> StudyConfig:
    """Read a study's configuration; its paths become absolute. Raises BadStudy with all that is wrong in it."""
    raw = _toml(path)
    wrong = [*_missing(raw), *unfit(raw, StudyConfig, "")]
    if not wrong:
        config = msgspec.convert(raw, StudyConfig)
        wrong = [*objections(config), *_contradictions(config)]
    if wrong:
        raise BadStudy("\n".join(f"{path}: {line}" for line in wrong))
    return _absolute(config, path.parent.absolute())


def _missing(raw: dict[str, Any]) -> list[str]:
    """Return an objection for each required field that is absent, those of `measure` included."""
    tables: list[tuple[str, type[msgspec.Struct], Any]] = [
        ("", StudyConfig, raw),
        ("measure.", Measure, raw.get("measure")),
    ]
    return [
        f"{prefix}{field.name}: found nothing; allowed: a value"
        for prefix, struct, table in tables
        for field in msgspec.structs.fields(struct)
        if isinstance(table, dict) and field.required and field.name not in table
    ]


def _contradictions(config: StudyConfig) -> list[str]:
    wrong = []
    if len(config.levels) < 2 or sorted(set(config.levels)) != config.levels:
        wrong.append(
            f"levels: found {config.levels}; allowed: two or more, each larger than the one before (three make a fit)"
        )
    if not config.measure.held_out:
        wrong.append("measure.held_out: found none; allowed: one folder or more of `etude data tokenize`")
    if config.measure.stride > config.measure.window:
        wrong.append(
            f"measure.stride: found {config.measure.stride}; allowed: 1 to measure.window, {config.measure.window}"
        )
    if config.rl.pack and config.rl.problems:
        wrong.append("rl.problems: found a file beside rl.pack; allowed: one of them")
    return wrong


def _absolute(config: StudyConfig, folder: Path) -> StudyConfig:
    def path(name: str) -> str:
        return str(folder / name)

    rl_paths = {name: path(value) for name in ("pack", "problems", "config") if (value := getattr(config.rl, name))}
    rl = msgspec.structs.replace(config.rl, **rl_paths)
    measure = msgspec.structs.replace(config.measure, held_out=[path(name) for name in config.measure.held_out])
    return msgspec.structs.replace(
        config, out=path(config.out), cpt=path(config.cpt), sft=path(config.sft), rl=rl, measure=measure
    )


def phase(path: Path, *, out: Path, checkpoint: Path | None = None, tokens: int | None = None) -> dict[str, Any]:
    """Return a phase's configuration with absolute paths and the fields that the study sets. `checkpoint`, `tokens`: None keeps
    the file's value. Raises BadStudy for a file that is not TOML. `etude train … --check` checks the fields."""
    raw = _toml(path)
    folder = path.parent.absolute()
    for name in _PATHS:
        if isinstance(raw.get(name), str):
            raw[name] = str(folder / raw[name])
    data: Any = raw.get("data")
    for name in _DATA_PATHS if isinstance(data, dict) else ():
        if isinstance(data.get(name), list):
            data[name] = [str(folder / item) if isinstance(item, str) else item for item in data[name]]
    raw["out"] = str(out)
    if checkpoint is not None:
        raw["checkpoint"] = str(checkpoint)
    if tokens is not None:
        train = raw.get("train", {})
        if not isinstance(train, dict):
            raise BadStudy(f"{path}: train: found {shown(train)}; allowed: a table")
        raw["train"] = {**train, "tokens": tokens}
    return raw


def decisive(table: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a phase's configuration that decide its weights: all but `out`, `machine`, `measure` and
    `train.checkpoint_every`. The phase itself goes by the same fields when it resumes."""
    kept = {name: value for name, value in table.items() if name not in ("out", "machine", "measure")}
    if isinstance(train := kept.get("train"), dict):
        kept["train"] = {name: value for name, value in train.items() if name != "checkpoint_every"}
    return kept


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise BadStudy(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadStudy(f"{path}: no TOML: {error}") from None


def written(table: dict[str, Any], name: str = "") -> str:
    """Return a table as TOML: texts, numbers, truth values, lists and tables."""
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = [f"[{name}]"] if name else []
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    inner = [
        written(value, f"{name}.{_key(key)}" if name else _key(key))
        for key, value in table.items()
        if isinstance(value, dict)
    ]
    return "\n".join([*lines, "", *inner])


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return _text(value)
    return json.dumps(value) if isinstance(value, bool | int) else repr(value)


def _text(text: str) -> str:
    """What JSON escapes TOML escapes alike; DEL alone is left, which TOML forbids."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
