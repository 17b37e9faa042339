"""What a demo run starts with: a problem pack, the base policy and one configuration, all in the object store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import xxhash

from etude import exchange
from etude.demo import changes
from etude.demo.options import DemoOptions
from shared.contracts.ids import new_run_id
from shared.contracts.run import Credit, Ref, Retry, RewardConfig, RunConfig, Sampling, ScheduleConfig, TrainConfig
from shared.objects import Objects
from shared.problems import Hidden, Problem, ProblemError
from shared.problems import pack as packs
from shared.problems.importing import import_jsonl
from shared.weights.checkpoint_objects import download_directory, upload_directory

BASE = Path(__file__).resolve().parent.parent / "data" / "base"
PACK = Path(".cache/pack")
SURPRISES = Path(".cache")
# Own problems: this share is held out for the report, chosen by a hash of the problem's relatives (`own_pack`).
OWN_HELD_OUT = 0.2


class DemoError(RuntimeError):
    """Something stands in the way; the text says what and how to go on."""


def make_pack(directory: Path = PACK) -> Path:
    """Problems from the Python code on this machine. Cached: the second call returns at once."""
    done = subprocess.run([sys.executable, "-m", "services.curator.cli", "mutate", "--out", str(directory)])
    if done.returncode:
        raise DemoError(f"the problem pack could not be made (exit code {done.returncode}); the lines above say why")
    return directory


def new_run(objects: Objects, options: DemoOptions) -> tuple[RunConfig, Ref]:
    """A run's pack, base policy and configuration, uploaded. Nothing is started. Raises DemoError."""
    if not options.base and not (BASE / "config.json").exists():
        raise DemoError(f"{BASE}: the base policy is missing; `make base` makes it")
    run = new_run_id()
    changed = changes.read(options.config) if options.config else {}  # before anything is made
    if options.problems:
        pack = own_pack(options.problems, options.state / "own-pack")
    else:
        pack = options.pack or make_pack()
    practice, held_out = upload_pack(objects, pack, "rl"), upload_pack(objects, pack, "held_out")
    base, directory = base_of(objects, run, options)
    surprise = None
    if not options.uniform_sampling:
        surprise = objects.put_file(f"runs/{run}/surprise.json", surprises(pack, directory))
    config = configure(run, options, base, practice, held_out, surprise)
    if options.config:
        config = changes.apply(config, changed, options.config)
    return config, store_config(objects, config)


def base_of(objects: Objects, run: str, options: DemoOptions) -> tuple[Ref, Path]:
    """What the run starts from, and a directory on this machine that holds it. Raises DemoError."""
    if not options.base:
        return upload_directory(objects, f"runs/{run}/base", BASE), BASE
    try:
        ref = exchange.stored(objects, options.base)
    except exchange.NotExchanged as error:
        raise DemoError(f"--base: {error}") from None
    return ref, download_directory(objects, ref, options.state / "checkpoints" / ref.checksum)


def upload_pack(objects: Objects, directory: Path, split: str) -> tuple[Ref, Ref]:
    """Public and hidden part of one split. Keys are by content: the same pack is stored once."""
    refs = []
    for part in packs.PARTS:
        path = directory / packs.file_name(split, part)
        if not path.exists():
            raise DemoError(
                f"{path}: missing; a run needs a pack with rl and held_out (etude tasks mutate --out NEW_DIRECTORY). "
                "Problems of your own: --problems FILE.jsonl (docs/problems.md)"
            )
        refs.append(objects.put_file(f"packs/{directory.name}/{path.name}", path))
    return refs[0], refs[1]


def surprises(pack: Path, base: Path = BASE) -> Path:
    """How surprising the reference repairs of the practice problems are to the base policy. Cached by what it is computed
    from."""
    digest = xxhash.xxh3_64()
    made_from = [base / name for name in ("model.safetensors", "config.json", "tokenizer.json", "etude.json")]
    for path in [*made_from, *(pack / packs.file_name("rl", part) for part in packs.PARTS)]:
        digest.update(path.read_bytes())
    out = SURPRISES / f"surprise-{digest.hexdigest()}.json"
    if not out.exists():
        command = [sys.executable, "-m", "services.trainer.base", "surprise", "--pack", str(pack), "--out", str(out)]
        command += ["--checkpoint", str(base)]
        if code := subprocess.run(command).returncode:
            raise DemoError(f"the surprise of the problems could not be computed (exit code {code}); see above")
    return out


def limits(retry: Retry) -> Sampling:
    """A fresh retry costs a few tokens: more of them fit into an attempt, and a repeat is drawn again."""
    if retry == "append":
        return Sampling()
    return Sampling(retry=retry, max_completion_tokens=384, max_turns=8, max_repeats=16)


def training(options: DemoOptions) -> TrainConfig:
    """Small steps for the features, large ones for how sure the policy is, and none at the end (docs/results.md)."""
    return TrainConfig(
        learning_rate=1e-4,
        last_norm_learning_rate=0.02,
        cooldown=0.5,
        router_replay=options.router_replay,
        credit=Credit(per=options.credit),
    )


def configure(
    run: str,
    options: DemoOptions,
    base: Ref,
    practice: tuple[Ref, Ref],
    held_out: tuple[Ref, Ref],
    surprise: Ref | None = None,
) -> RunConfig:
    """All of the recipe on by default; each ablation is one flag."""
    reward = (
        RewardConfig()
        if options.length_penalty
        else msgspec.structs.replace(RewardConfig(), id="no-length", length=None)
    )
    schedule = msgspec.structs.replace(
        ScheduleConfig(),
        minutes=options.minutes,
        max_steps=options.steps,
        max_staleness=options.staleness,
        hardness_sampling=not options.uniform_sampling,
        groups_per_step=options.groups_per_step,
        group_size=options.group_size,
        group_min=max(2, options.group_size // 2),
    )
    return RunConfig(
        run=run,
        seed=options.seed,
        base=base,
        pack=practice[0],
        pack_hidden=practice[1],
        surprise=surprise,
        eval_pack=held_out[0],
        eval_pack_hidden=held_out[1],
        sampling=limits(options.retry),
        reward=reward,
        schedule=schedule,
        train=training(options),
    )


def store_config(objects: Objects, config: RunConfig) -> Ref:
    return objects.put(f"runs/{config.run}/config.json", msgspec.json.encode(config))


def own_pack(path: Path, directory: Path) -> Path:
    """A pack of two splits (rl, held_out) from a user's JSONL file, relatives kept together. Raises DemoError."""
    pairs = own_problems(path)
    splits: dict[str, list[tuple[Problem, Hidden]]] = {"rl": [], "held_out": []}
    for problem, hidden in pairs:
        relatives = problem.cell or problem.id
        held = xxhash.xxh3_64_intdigest(relatives.encode()) % 1000 < OWN_HELD_OUT * 1000
        splits["held_out" if held else "rl"].append((problem, hidden))
    for name, members in splits.items():
        if not members:
            raise DemoError(f"{path}: {len(pairs)} problems are too few: none is left for {name!r}; give at least 20")
        write_split(directory, name, members)
    return directory


def own_problems(path: Path) -> list[tuple[Problem, Hidden]]:
    """A user's JSONL file (docs/problems.md). Raises DemoError naming every bad line and its field."""
    try:
        return import_jsonl(path)
    except ProblemError as error:
        raise DemoError(str(error)) from None


def write_split(directory: Path, name: str, members: list[tuple[Problem, Hidden]]) -> Path:
    """Both parts of one split. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / packs.file_name(name, "public")).write_bytes(packs.write(problem for problem, _ in members))
    (directory / packs.file_name(name, "hidden")).write_bytes(packs.write(hidden for _, hidden in members))
    return directory
