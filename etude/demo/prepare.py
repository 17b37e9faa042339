"""What a demo run starts with: a problem pack, the base policy and one configuration, all in the object store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import xxhash
from rich.console import Console

from etude import exchange
from etude.demo import changes
from etude.demo.background import call
from etude.demo.checking import checked
from etude.demo.options import DemoOptions
from shared.contracts import probe as probes
from shared.contracts import schedulable
from shared.contracts.ids import new_run_id
from shared.contracts.run import (
    Credit,
    LengthPenalty,
    Ref,
    Retry,
    RewardConfig,
    RunConfig,
    Sampling,
    ScheduleConfig,
    TrainConfig,
)
from shared.objects import Objects
from shared.objects.directory import DirectoryObjects
from shared.problems import Hidden, Problem, ProblemError
from shared.problems import pack as packs
from shared.problems.importing import STORE, Line
from shared.problems.splits import HELD_OUT, own_splits
from shared.renderers import Renderer
from shared.renderers.fitting import Fitting, fit, read_fitting
from shared.renderers.formats import compact_1
from shared.renderers.registry import load_renderer
from shared.sandbox import SandboxUnavailable
from shared.visible import visible
from shared.weights.checkpoint_objects import download_directory, upload_directory

BASE = Path(__file__).resolve().parent.parent / "data" / "base"
PACK = Path(".cache/pack")
SURPRISES = Path(".cache")
# Whatever the run is for, these say that its training is broken: going on would only use up problems. Set here and not in the
# contract, whose default is what the field's absence means in runs that are stored.
PAUSE_ON = ("gradient_not_finite", "age_bound_breached")


class DemoError(RuntimeError):
    """Something stands in the way; the text says what and how to go on."""


def make_pack(directory: Path = PACK) -> Path:
    """Problems from the Python code on this machine. Cached: the second call returns at once."""
    if code := call("services.curator.cli", "mutate", "--out", str(directory)):
        raise DemoError(f"the problem pack could not be made (exit code {code}); the lines above say why")
    return directory


def new_run(objects: Objects, options: DemoOptions) -> tuple[RunConfig, Ref]:
    """A run's pack, base policy and configuration, uploaded. Nothing is started. Raises DemoError."""
    if not options.base and not (BASE / "config.json").exists():
        raise DemoError(f"{BASE}: the base policy is missing; `make base` makes it")
    run = new_run_id()
    imported, directory = base_of(objects, options)
    chat = chat_format(directory)
    if speaks_chat(chat):
        options = replace(options, chat=True, retry="append")
    config = planned(run, options)  # before anything is made
    step = config.schedule.groups_per_step
    if options.problems:
        folder = options.state / "own-pack"  # where the run is started, there may be no sandbox
        pack = own_pack(options.problems, folder, chat, step, must_check=False)
    else:
        pack = options.pack or make_pack()
        parts_of(pack, "held_out")
        require_a_step(str(pack), problems_in(pack, "rl"), step)
    probe = stored_probe(objects, run, options.probe, pack) if options.probe else None
    practice, held_out = upload_pack(objects, pack, "rl"), upload_pack(objects, pack, "held_out")
    surprise = None
    if not options.uniform_sampling and not options.chat:  # the estimate is made of the small policy's repairs
        surprise = objects.put_file(f"runs/{run}/surprise.json", surprises(pack, directory))
    config = msgspec.structs.replace(
        config,
        base=imported or upload_directory(objects, f"runs/{run}/base", directory),
        pack=practice[0],
        pack_hidden=practice[1],
        surprise=surprise,
        probe=probe,
        eval_pack=held_out[0],
        eval_pack_hidden=held_out[1],
    )
    return config, store_config(objects, config)


def planned(run: str, options: DemoOptions) -> RunConfig:
    """The configuration, whose parts are not in the store yet. Raises what `changes` raises, DemoError."""
    nothing = Ref(key="", size=0, checksum="")
    if options.probe:
        read_probe(options.probe)
    config = configure(run, options, nothing, (nothing, nothing), (nothing, nothing))
    if options.config:
        config = changes.apply(config, changes.read(options.config), options.config)
    if why := schedulable.objections(config):
        raise DemoError(f"no run can be of this: {'; '.join(why)} (options of `etude demo`, or --config)")
    return config


def base_of(objects: Objects, options: DemoOptions) -> tuple[Ref | None, Path]:
    """What the run starts from, None for the base policy that is part of the package; and a directory on this machine that
    holds it. Raises DemoError."""
    if not options.base:
        return None, BASE
    try:
        ref = exchange.stored(objects, options.base)
    except exchange.NotExchanged as error:
        raise DemoError(f"--base: {error}") from None
    return ref, download_directory(objects, ref, options.state / "checkpoints" / ref.checksum)


def upload_pack(objects: Objects, directory: Path, split: str) -> tuple[Ref, Ref]:
    """Public and hidden part of one split. Keys are by content: the same pack is stored once, and another one in a folder of
    the same name takes nothing away from a run that was started with the first."""
    paths = parts_of(directory, split)
    try:
        packs.upload_trees(packs.Lines(paths[0].read_bytes(), Problem).with_refs(), directory, objects)
    except packs.PackError as error:
        raise DemoError(f"{directory}: split {split}: {error}") from None
    public, hidden = (objects.put_file(_content_key(path), path) for path in paths)
    return public, hidden


def _content_key(path: Path) -> str:
    return f"packs/{xxhash.xxh3_64_hexdigest(path.read_bytes())}/{path.name}"


def parts_of(directory: Path, split: str) -> list[Path]:
    """The public and the hidden file of one split. Raises DemoError that says which splits there are."""
    paths = [directory / packs.file_name(split, part) for part in packs.PARTS]
    missing = [path for path in paths if not path.exists()]
    if missing:
        there = ", ".join(packs.splits_in(directory)) or "none"
        raise DemoError(
            f"{missing[0]}: missing; found the splits: {there}; allowed: rl and held_out for a run, held_out or dev for "
            "`etude eval` (--split). `etude tasks import FILE.jsonl --out NEW_DIRECTORY` makes rl and held_out of your own "
            "problems, `etude tasks mutate --out NEW_DIRECTORY` all of them from installed code; without a pack: "
            "--problems FILE.jsonl (docs/problems.md)"
        )
    return paths


def read_probe(path: Path) -> tuple[bytes, probes.Probe]:
    """Return a file that `etude tasks probe` wrote, as it is and read. Raises DemoError."""
    try:
        return (data := path.read_bytes()), probes.read(data)
    except OSError as error:
        raise DemoError(f"--probe {path}: cannot be read: {error.strerror}") from None
    except probes.BadProbe as error:
        raise DemoError(f"--probe {path}: {error}") from None


def stored_probe(objects: Objects, run: str, path: Path, pack: Path) -> Ref:
    """Upload a probe of the problems that a run practises on. Raises DemoError."""
    data, probe = read_probe(path)
    public, _ = parts_of(pack, "rl")
    try:
        ids = set(packs.Lines(public.read_bytes(), Problem).ids)
        probes.require_known(probe, ids, f"split rl of {pack}")
    except (probes.BadProbe, packs.PackError) as error:
        raise DemoError(f"--probe {path}: {error}") from None
    return objects.put(f"runs/{run}/probe.json", data)


def problems_in(directory: Path, split: str) -> int:
    """How many a split has. Raises DemoError."""
    public, _ = parts_of(directory, split)
    try:
        return len(packs.Lines(public.read_bytes(), Problem))
    except packs.PackError as error:
        raise DemoError(f"{public}: {error}") from None


def require_a_step(source: str, problems: int, groups_per_step: int) -> None:
    """Raises DemoError where a run would end before its first step. `source`: where the problems to practise on are from."""
    if problems < groups_per_step:
        most = f"{problems} or less" if problems > 1 else "1"
        smaller = f"schedule.groups_per_step of {most} in --config (etude demo: --groups-per-step)"
        raise DemoError(
            f"{source}: found {problems} problems to practise on; a step takes {groups_per_step} and each is practised once: not "
            f"one step is possible. Allowed: {groups_per_step} or more{f', or smaller steps: {smaller}' if problems else ''}"
        )


def surprises(pack: Path, base: Path = BASE) -> Path:
    """How surprising the reference repairs of the practice problems are to the base policy. Cached by what it is computed
    from."""
    digest = xxhash.xxh3_64()
    made_from = [base / name for name in ("model.safetensors", "config.json", "tokenizer.json", "etude.json")]
    for path in [*made_from, *(pack / packs.file_name("rl", part) for part in packs.PARTS)]:
        digest.update(path.read_bytes())
    out = SURPRISES / f"surprise-{digest.hexdigest()}.json"
    if not out.exists():
        files = ("--pack", str(pack), "--out", str(out), "--checkpoint", str(base))
        if code := call("services.trainer.base", "surprise", *files):
            raise DemoError(f"the surprise of the problems could not be computed (exit code {code}); see above")
    return out


def limits(retry: Retry, *, chat: bool = False) -> Sampling:
    """Return the limits of an attempt. A problem's own win over them. The shipped policy: a fresh retry costs a few tokens, so
    more of them fit into an attempt, and a repeat is drawn again."""
    if chat:
        return Sampling(max_completion_tokens=8192, max_turns=30, max_edits=30)
    if retry == "append":
        return Sampling()
    return Sampling(retry=retry, max_completion_tokens=384, max_turns=8, max_repeats=16)


def training(options: DemoOptions) -> TrainConfig:
    """Return how a run learns. A chat model takes the small steps that are usual for pretrained ones. The shipped one takes
    small steps for the features, large ones for how sure the policy is, and none at the end (docs/results.md)."""
    if options.chat:
        credit = Credit(per="attempt", failed_share=0.0)
        return TrainConfig(learning_rate=2e-6, router_replay=options.router_replay, credit=credit, norm_tokens=1024.0)
    return TrainConfig(
        learning_rate=1e-4,
        last_norm_learning_rate=0.02,
        cooldown=0.5,
        router_replay=options.router_replay,
        credit=Credit(per=options.credit),
        norm_tokens=40.0,  # what its attempts sample; every result was measured with it
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
    reward = RewardConfig(length=LengthPenalty(unit_tokens=1024.0)) if options.chat else RewardConfig()
    if not options.length_penalty:
        reward = msgspec.structs.replace(reward, id="no-length", length=None)
    schedule = msgspec.structs.replace(
        ScheduleConfig(),
        minutes=options.minutes,
        max_steps=options.steps,
        max_staleness=options.staleness,
        hardness_sampling=not options.uniform_sampling,
        groups_per_step=options.groups_per_step,
        group_size=options.group_size,
        group_min=max(2, options.group_size // 2),
        pause_on=list(PAUSE_ON),
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
        sampling=limits(options.retry, chat=options.chat),
        reward=reward,
        schedule=schedule,
        train=training(options),
    )


def store_config(objects: Objects, config: RunConfig) -> Ref:
    return objects.put(f"runs/{config.run}/config.json", msgspec.json.encode(config))


def own_pack(
    path: Path, directory: Path, chat: Renderer | None = None, groups_per_step: int = 0, *, must_check: bool = True
) -> Path:
    """A pack of two splits (rl, held_out) of those problems of a user's JSONL file that the policy's chat format can take and
    that pass the check, relatives kept together. Says how many there are, what was left out and why. `chat`: of the base policy
    where left out; `groups_per_step`: 0 where no run is started; `must_check`: without a sandbox nothing goes on. Raises
    DemoError, also where not one step is possible."""
    chat = chat or chat_format(BASE)
    fitting = _fitting(path, chat)
    _own_splits(path, fitting, groups_per_step)  # before each is run: a split goes by the problems' names
    fitting = _checked(path, fitting, chat, must=must_check)
    for said in filter(None, (fitting.left_out(), fitting.doubt(), fitting.unproven())):
        tell(f"{path}: {said}")
    splits = _own_splits(path, fitting, groups_per_step)
    if groups_per_step:
        count = {name: len(members) for name, members in splits.items()}
        tell(
            f"{path}: {count['rl']} problems to practise on, each once: at most {count['rl'] // groups_per_step} steps of "
            f"{groups_per_step}; {count['held_out']} held out for the report"
        )
    for name, members in splits.items():
        write_split(directory, name, members)
    return directory


def _own_splits(path: Path, fitting: Fitting, groups_per_step: int) -> dict[str, list[tuple[Any, Any]]]:
    """Raises DemoError where a split gets nothing or no step is possible."""
    splits = own_splits(fitting.pairs, HELD_OUT)
    count = {name: len(members) for name, members in splits.items()}
    empty = [name for name in splits if not count[name]]
    if empty and len(fitting.pairs) >= groups_per_step:
        cells = len({problem.cell or problem.id for problem, _ in fitting.pairs})
        raise DemoError(
            f"{path}: none of {len(fitting.pairs)} problems is left for {empty[0]}: a fifth of the cells is held out, by a hash "
            f"of their names, relatives together; found {cells} in field 'cell' (left out: the id); allowed: so many that both "
            "splits get some, nearly always from 20 on"
        )
    require_a_step(
        f"{path} ({len(fitting.pairs)} problems, {count['held_out']} held out)", count["rl"], groups_per_step
    )
    return splits


def own_problems(path: Path, checkpoint: Path = BASE, *, leave_out: bool = False) -> Fitting:
    """All of a user's JSONL file (docs/problems.md), for a measurement, which leaves nothing out unless it is told to. Raises
    DemoError naming every bad line and its field, every problem that the checkpoint's chat format cannot take, and every one that
    does not pass the check."""
    chat = chat_format(checkpoint)
    fitting = _fitting(path, chat)
    if leave_out or not fitting.refused:  # else there is no need to wait for the sandbox
        fitting = _checked(path, fitting, chat)
    if fitting.without and not leave_out:
        raise leaves_nothing_out(path, fitting)
    return fitting


def fitting_split(pack: Path, split: str, checkpoint: Path, *, leave_out: bool) -> Fitting:
    """The same of one split of a pack, whose problems were checked when it was made. Raises DemoError."""
    public, hidden = parts_of(pack, split)
    try:
        secrets = packs.Lines(hidden.read_bytes(), Hidden)
        lines = [Line(0, problem, secrets[problem.id]) for problem in packs.read_problems(public.read_bytes())]
    except packs.PackError as error:
        raise DemoError(f"{pack}: split {split}: {error}") from None
    except KeyError as error:
        raise DemoError(f"{hidden}: found no hidden part of problem {error}") from None
    fitting = fit(lines, chat_format(checkpoint))
    if not fitting.lines or (fitting.without and not leave_out):
        raise leaves_nothing_out(public, fitting)
    return fitting


def leaves_nothing_out(path: Path, fitting: Fitting) -> DemoError:
    return DemoError(
        f"{path}: {fitting.refusal()}\nA measurement leaves nothing out by itself: mend or shorten these, take them away, or "
        "--leave-out, which counts them"
    )


def _fitting(path: Path, chat: Renderer) -> Fitting:
    try:
        return read_fitting(path, chat)
    except ProblemError as error:
        raise DemoError(str(error)) from None


def _checked(path: Path, fitting: Fitting, chat: Renderer, *, must: bool = True) -> Fitting:
    try:
        return checked(path, fitting, chat)
    except ProblemError as error:
        raise DemoError(str(error)) from None
    except SandboxUnavailable as error:
        if must:
            raise DemoError(f"{path}: the problems cannot be checked: {error}") from None
        tell(f"{path}: not checked here, the run's admission checks those to practise on alone: {error}")
        return fitting


def speaks_chat(chat: Renderer) -> bool:
    """Return whether a policy is a chat model, and not one of the small ones that `make base` makes."""
    return chat.name != compact_1.NAME


def chat_format(checkpoint: Path) -> Renderer:
    """Raises DemoError."""
    try:
        return load_renderer(checkpoint)
    except ValueError as error:
        raise DemoError(str(error)) from None
    except KeyError as error:
        raise DemoError(f"{checkpoint}/etude.json: found no field {error}; `etude export` writes it") from None


def tell(text: str) -> None:
    Console(stderr=True).print(visible(text), markup=False, highlight=False, soft_wrap=True)


def write_split(directory: Path, name: str, members: Sequence[tuple[Problem, Hidden]], trees: Path = STORE) -> Path:
    """Both parts of one split, and the trees that its problems need, which lie in `trees`. Returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    packs.keep_trees((problem for problem, _ in members), DirectoryObjects(trees), directory)
    (directory / packs.file_name(name, "public")).write_bytes(packs.write(problem for problem, _ in members))
    (directory / packs.file_name(name, "hidden")).write_bytes(packs.write(hidden for _, hidden in members))
    return directory
