"""What a phase is told: a TOML file, typed and checked field by field before anything is read or written.

The comment above or beside a field is what docs/phases.md says of it.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from services.trainer.schedule import Kind
from shared.contracts.allowed import Length, Number, objections, unfit
from shared.contracts.run import Count, Positive, Share, TrainConfig, Weight
from shared.settings import Told

Phase = Literal["cpt", "extend", "sft", "mtp"]
PHASES: tuple[Phase, ...] = ("cpt", "extend", "sft", "mtp")
Place = Annotated[str, Length(4096)]


class BadPhase(Told, ValueError):
    """The phase cannot begin. A line for each field: its name, what was found, what is allowed."""


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained on. Paths are relative to the configuration's folder."""

    tokens: list[str] = []  # folders that `etude data tokenize` wrote; of cpt, extend and mtp
    conversations: list[str] = []  # JSONL files of chats; of sft, and of mtp
    # Recorded attempts, of sft and of mtp: object stores' runs as STORE#RUN, e.g. "file:.etude/objects#r-20260101T000000-abcd"
    trajectories: list[str] = []
    solved: bool = True  # of the recorded attempts, only those whose verdict says solved
    held_out: list[str] = []  # folders of tokens that nothing is trained on; each is one codebase
    held_out_conversations: list[str] = []  # JSONL files
    length: Annotated[int, Number(least=2, most=2**24)] = (
        2048  # tokens of a sequence, at most; longer documents are cut
    )
    # A conversation or an attempt that is longer: refuse it, or leave it out
    too_long: Literal["refuse", "leave_out"] = "refuse"
    # Weight of tokens that the assistant did not write, where its own count 1; of sft
    context_weight: Annotated[float, Number(least=0, most=1)] = 0.0


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """How positions are stretched (`rope_parameters` of config.json)."""

    type: Literal["default", "linear", "yarn"] = "default"
    factor: Annotated[float, Number(least=1, most=4096)] = 1.0  # of linear and yarn
    theta: Annotated[float, Number(least=0, zero="as it is")] = 0.0  # the base of the rotations; 0: as it is
    # Of yarn: the context before; 0: the checkpoint's max_position_embeddings
    original: Annotated[int, Number(least=0, zero="max_position_embeddings")] = 0


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of the checkpoint before it is trained."""

    rope: Rope | None = None  # null: as it is
    # New MTP layers where the checkpoint has none. They start from random weights. Phase mtp makes one unless told otherwise
    mtp_layers: Annotated[int, Number(least=0, most=1)] = 0


class Optimise(msgspec.Struct, frozen=True, kw_only=True):
    tokens: Count = 0  # targets of the whole phase; 0: `epochs` says
    epochs: Annotated[float, Number(above=0, most=1000)] = 1.0  # passes over the data, where `tokens` is 0
    step_tokens: Positive = 16384  # tokens of an update, at least; the last sequence may go beyond
    micro_batch_tokens: Positive = 4096  # computed at a time; a longer sequence is computed alone
    learning_rate: Share = 1e-4  # of AdamW
    mtp_learning_rate: Share = 3e-4  # of the MTP layers alone
    schedule: Kind = "cosine"  # constant, cosine, linear, or wsd: constant, and linear in the last `decay`
    floor: Share = 0.1  # share of the learning rate at the end
    decay: Share = 0.2  # of wsd: the last share of the phase
    warmup_steps: Count = 20
    betas: Annotated[tuple[float, float], Number(least=0, below=1)] = (0.9, 0.95)
    weight_decay: Annotated[float, Number(least=0, most=100)] = 0.0
    clip_norm: Annotated[float, Number(above=0)] = 1.0
    # The MTP layers learn in the same step, and nothing of it reaches the trunk. auto: in extend, sft and mtp, if there are any
    mtp: Literal["auto", "on", "off"] = "auto"
    balance: Weight = 0.01  # of the routers' load-balancing loss; models without experts have none
    checkpoint_every: Positive = 50  # steps; an interrupted phase goes on from the last one


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """The loss on held-out data, before the first step, at the end, and in between."""

    every: Count = 0  # steps; 0: only before and after
    # Tokens of context, at most, and tokens that a window is moved on by; `stride` tokens of a window count, each once
    window: Annotated[int, Number(least=2, most=2**24)] = 2048
    stride: Annotated[int, Number(least=1, most=2**24)] = 1024
    tokens: Count = 0  # first tokens of each codebase; 0: all


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Number(least=1, most=1024)] = 1  # of torch on the CPU
    recompute: bool = (
        False  # layers keep their inputs alone and are computed again in the backward: less memory, more time
    )
    # Of forward and backward; auto: bfloat16 on CUDA, float32 on the CPU
    arithmetic: Literal["auto", "float32", "bfloat16"] = "auto"
    zero_stage: Annotated[int, Number(least=0, most=2)] = 0  # of DeepSpeed
    context_ranks: Annotated[int, Number(least=1, most=4096)] = 1  # ranks that share a sequence
    expert_ranks: Annotated[int, Number(least=1, most=4096)] = 1  # ranks that divide the experts


class PhaseConfig(msgspec.Struct, frozen=True, kw_only=True):
    checkpoint: Place  # where it starts: a folder that `etude import` or a phase wrote
    out: Place  # where the new checkpoint goes; OUT.work holds what an interrupted phase goes on from
    seed: Annotated[int, Number(least=0, most=2**63 - 1)] = 1
    data: Data = Data()
    model: Model = Model()
    train: Optimise = Optimise()
    measure: Measure = Measure()
    machine: Machine = Machine()

    def train_config(self, phase: Phase, mtp: bool) -> TrainConfig:
        """Return what the step and the engine read. The loss is divided by targets, so `norm_tokens` is 1."""
        own = self.train
        return TrainConfig(
            learning_rate=own.learning_rate,
            mtp_learning_rate=own.mtp_learning_rate,
            warmup_steps=own.warmup_steps,
            betas=own.betas,
            weight_decay=own.weight_decay,
            clip_norm=own.clip_norm,
            micro_batch_tokens=own.micro_batch_tokens,
            norm_tokens=1.0,
            router_replay=False,
            mtp=mtp,
        )


def read(path: Path, phase: Phase) -> PhaseConfig:
    """Read a configuration; its paths become absolute. Raises BadPhase with all that is wrong in it."""
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise BadPhase(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadPhase(f"{path}: no TOML: {error}") from None
    missing = [f"{name}: found nothing; allowed: a path" for name in ("checkpoint", "out") if name not in raw]
    wrong = [*missing, *unfit(raw, PhaseConfig, "")]
    if not wrong:
        config = msgspec.convert(raw, PhaseConfig)
        wrong = [*objections(config), *_contradictions(config, phase)]
    if wrong:
        raise BadPhase("\n".join(f"{path}: {line}" for line in wrong))
    return _absolute(config, path.parent.absolute())


def _contradictions(config: PhaseConfig, phase: Phase) -> list[str]:
    """Return what each field allows by itself and the phase does not."""
    data, wrong = config.data, []
    chats = {"data.conversations": data.conversations, "data.trajectories": data.trajectories}
    if phase in ("cpt", "extend"):
        if not data.tokens:
            wrong.append(
                f"data.tokens: found none; allowed: one folder or more, of `etude data tokenize` (phase {phase})"
            )
        wrong += [f"{name}: found {len(of)}; allowed: none in phase {phase}" for name, of in chats.items() if of]
    elif phase == "sft":
        if data.tokens:
            wrong.append(f"data.tokens: found {len(data.tokens)}; allowed: none in phase sft")
        if not any(chats.values()):
            wrong.append("data.conversations, data.trajectories: found none; allowed: one or more of either")
    elif not data.tokens and not any(chats.values()):
        wrong.append("data.tokens, data.conversations, data.trajectories: found none; allowed: one or more")
    elif data.tokens and any(chats.values()):
        wrong.append("data.tokens: found some beside chats; allowed: one of them")
    for at, name in enumerate(data.trajectories):
        if "#" not in name:
            wrong.append(
                f"data.trajectories[{at}]: found {name!r:.80}; allowed: STORE#RUN, e.g. 'file:.etude/objects#r-…'"
            )
    if phase == "mtp" and config.train.mtp == "off":
        wrong.append("train.mtp: found 'off'; allowed: 'auto', 'on' in phase mtp")
    if phase == "mtp" and config.machine.zero_stage:
        wrong.append(
            f"machine.zero_stage: found {config.machine.zero_stage}; allowed: 0 in phase mtp, where the trunk does not learn"
        )
    if phase == "extend" and config.model.rope is None:
        wrong.append("model.rope: found nothing; allowed: a table with type and factor, or theta, in phase extend")
    if config.measure.stride > config.measure.window:
        wrong.append(
            f"measure.stride: found {config.measure.stride}; allowed: 1 to measure.window, {config.measure.window}"
        )
    return wrong


def _absolute(config: PhaseConfig, folder: Path) -> PhaseConfig:
    def paths(of: list[str]) -> list[str]:
        return [str(folder / one) for one in of]

    data = config.data
    return msgspec.structs.replace(
        config,
        checkpoint=str(folder / config.checkpoint),
        out=str(folder / config.out),
        data=msgspec.structs.replace(
            data,
            tokens=paths(data.tokens),
            conversations=paths(data.conversations),
            held_out=paths(data.held_out),
            held_out_conversations=paths(data.held_out_conversations),
        ),
    )


def differences(before: dict[str, Any], now: PhaseConfig) -> list[str]:
    """Return the fields in which a phase that was interrupted was told otherwise. `machine`, `measure` and `checkpoint_every` may
    change: they change no weight, but for the ranks, whose sums differ in the last bits."""

    def flat(value: Any, place: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            return {place: value}
        return {n: v for name, of in value.items() for n, v in flat(of, f"{place}.{name}".lstrip(".")).items()}

    old, new = (
        flat(before),
        flat(msgspec.json.decode(msgspec.json.encode(now))),
    )  # lists for tuples, as they were stored
    free = ("machine.", "measure.", "train.checkpoint_every", "out")
    return [
        f"{name}: found {new.get(name)!r:.80}; allowed: {old.get(name)!r:.80}, as it began"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and not name.startswith(free)
    ]
