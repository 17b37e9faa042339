"""From the installed Python code to a pack: mine, split, record, break, check, write.

What is written follows from the Python version, the installed distributions and GENERATOR alone: everything is sorted,
every random choice is seeded by the function's key, and nothing depends on the order in which processes finish.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import platform
import shutil
import signal
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from services.curator import breaking, fuzz, mine
from services.curator.folder import inventory_of
from services.curator.mine import Function, Inventory, SourceFile
from shared.objects import Objects
from shared.output import require_folder
from shared.problems import pack, values
from shared.problems.schema import FunctionHidden, FunctionProblem
from shared.problems.signatures import Known, Signatures, read_signatures
from shared.problems.splits import SPLITS, share
from shared.sandbox import FunctionRun, Limits, SandboxUnavailable, connect
from shared.sandbox.pool import FunctionPool

GENERATOR = 5  # raise it when the same code would give another pack
FORMAT = "etude-pack-1"
OWN = "own"  # key of a pack that was imported: it cannot be made again from what is installed
# Problems of one function at most: the curves measure skill on functions, not on variants of a few.
_PER_FUNCTION = {"train": 24, "rl": 20, "dev": 3, "held_out": 3}
# Fewer distinct bugs than this in a whole function: it is too simple to teach or measure anything.
_MIN_PER_FUNCTION = 3
_CHUNK = 24  # functions that one process takes at a time

Progress = Callable[[str, int, int], None]  # stage, done, of


class Text(msgspec.Struct, kw_only=True):
    """A line of pretrain.jsonl.zst: a function of the train split, whether it can be run or not."""

    id: str
    source: str
    entry: str
    executable: bool
    origin: str
    licence: str


@dataclass(slots=True)
class Made:
    """What one process made of a chunk."""

    problems: list[tuple[str, FunctionProblem, FunctionHidden]] = field(default_factory=list)  # with their split
    recorded: int = 0


def cache_key(inventory: Inventory, exclude: Path | None) -> str:
    """Changes with anything that the pack depends on."""
    facts = {
        "generator": GENERATOR,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "distributions": inventory.versions,
        "excluded": hashlib.blake2b(exclude.read_bytes(), digest_size=16).hexdigest() if exclude else "",
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def build(
    out: Path,
    *,
    sandbox: str = "bubblewrap",
    processes: int = 2,
    exclude: Path | None = None,
    also: Path | None = None,
    folder: Path | None = None,
    limit: int = 0,
    progress: Progress = lambda stage, done, of: None,
) -> dict[str, Any]:
    """Writes the pack into `out`, whole or not at all, and returns its manifest. A pack already there and made from the
    same things is left as it is. `also`: a directory of distributions beside the installed ones. `folder`: source code that is read
    instead of both. `limit`: at most so many
    files, for a quick look. Raises SandboxUnavailable, and ValueError for a sandbox or a file of signatures that is none,
    and for a directory that holds anything but such a pack."""
    _refuse_others(out)
    inventory = mine.inventory(also) if folder is None else inventory_of(folder)
    if limit:
        inventory.files.sort(key=lambda file: share(f"limit {file.distribution}:{file.module}"))
        del inventory.files[limit:]
        inventory.files.sort(key=lambda file: (file.distribution, file.module))
    key = cache_key(inventory, exclude) + (f"-{limit}" if limit else "")
    ready = read_manifest(out)
    if ready is not None and ready["key"] == key and _intact(out, ready):
        return ready
    require_folder(out, "--out")
    carried = _carried(sandbox)
    with _workers(processes, sandbox) as workers:
        functions = _mine(workers, inventory, progress)
        functions = _distinct(functions, read_signatures(exclude) if exclude else Known.none())
        made = Made()
        candidates = [
            (f.split, f, inventory.licences[f.distribution])
            for f in functions
            if f.executable and not mine.carried(f, carried)
        ]
        chunks = [candidates[start : start + _CHUNK] for start in range(0, len(candidates), _CHUNK)]
        for done, part in enumerate(workers.map(_make, chunks), 1):
            made.problems += part.problems
            made.recorded += part.recorded
            progress("recording behaviour, breaking functions", done, len(chunks))
    return _write(out, key, inventory, functions, made)


def _mine(workers: Executor, inventory: Inventory, progress: Progress) -> list[Function]:
    """Every function once by its text, with fingerprint, in the order of the inventory; but a text that the standard library
    has, too, is the standard library's: in the sandbox that copy can be imported, unless it is the origin."""
    found: dict[str, Function] = {}
    files = sorted(inventory.files, key=lambda file: file.distribution != "python")
    for done, functions in enumerate(workers.map(_functions, files, chunksize=32)):
        for function in functions:
            found.setdefault(function.source, function)
        if done % 64 == 0 or done + 1 == len(files):
            progress("reading installed code", done + 1, len(files))
    result = []
    for done, marked in enumerate(workers.map(mine.with_fingerprint, list(found.values()), chunksize=64)):
        if marked is not None:
            result.append(marked)
        if done % 256 == 0 or done + 1 == len(found):
            progress("fingerprints", done + 1, len(found))
    return result


def _functions(file: SourceFile) -> list[Function]:
    return mine.functions(file, texts=file.split == "train")


def _distinct(functions: Sequence[Function], excluded: Known) -> list[Function]:
    """No function twice, and none that nearly equals one of another split; held-out first, train gives way.
    `excluded`: what the base policy has seen; it stays in train and leaves every other split."""
    seen: set[str] = set()
    others = Signatures()
    kept: list[Function] = []
    for split in ("held_out", "dev", "rl", "train"):
        for function in functions:
            if function.split != split or function.key in seen:
                continue
            if others.has_near(function.key, function.minima):
                continue
            if split != "train":
                if excluded.has_near(function.key, function.minima):
                    continue
                others.add(function.key, function.minima)
            seen.add(function.key)
            kept.append(function)
    return kept


def _carried(kind: str) -> frozenset[str]:
    """The modules that the interpreter of every sandbox carries: an agent finds their functions in its own process, so none of
    them makes a problem. Raises ValueError or SandboxUnavailable, now rather than after a minute of reading."""
    source = """
import _imp, sys
def f():
    return [*sys.modules, *sys.builtin_module_names, *_imp._frozen_module_names()]
"""
    functions = connect(kind, 1)
    try:
        ((result,),) = functions.run_sync([FunctionRun(source, "f", ("[]",), Limits(time_s=60.0, call_s=10.0))])
    finally:
        functions.close_sync()
    if result.value is None:
        raise SandboxUnavailable(f"a sandbox could not name the modules that it carries: {result.error}")
    return frozenset(values.decode(result.value))


@contextlib.contextmanager
def _workers(processes: int, sandbox: str) -> Iterator[Executor]:
    """A worker that dies ends the whole (BrokenProcessPool); Ctrl-C waits for the chunks in hand only."""
    context = multiprocessing.get_context("forkserver")
    executor = ProcessPoolExecutor(processes, context, _start_worker, (sandbox,))
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


_sandbox: FunctionPool | None = None


def _start_worker(sandbox: str) -> None:
    global _sandbox
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and decides
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    os.nice(5)  # the machine stays usable
    _sandbox = connect(sandbox, 1)


def _end_with_the_parent() -> None:
    """A parent that was killed cannot say goodbye; its workers would wait for work forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _make(chunk: Sequence[tuple[str, Function, str]]) -> Made:
    assert _sandbox is not None
    made = Made()
    by_key = {function.key: (split, licence) for split, function, licence in chunk}
    recorded = fuzz.record(_sandbox, [function for _, function, _ in chunk])
    made.recorded = len(recorded)
    wanted = [max(_PER_FUNCTION[by_key[r.function.key][0]], 2 * _MIN_PER_FUNCTION) for r in recorded]
    for own, broken in zip(recorded, breaking.break_functions(_sandbox, recorded, wanted), strict=True):
        split, licence = by_key[own.function.key]
        problems = [breaking.problem(own.function, licence, own.cases, one) for one in broken]
        checked = breaking.verified(_sandbox, own.function, [p for p in problems if p is not None])
        if len(checked) >= _MIN_PER_FUNCTION:
            made.problems += [(split, public, hidden) for public, hidden in checked[: _PER_FUNCTION[split]]]
    return made


def _write(out: Path, key: str, inventory: Inventory, functions: Sequence[Function], made: Made) -> dict[str, Any]:
    splits = {split: [(public, hidden) for s, public, hidden in made.problems if s == split] for split in SPLITS}
    texts = [
        Text(
            id=f.key,
            source=f.source,
            entry=f.entry,
            executable=f.executable,
            origin=f.origin,
            licence=inventory.licences[f.distribution],
        )
        for f in functions
        if f.split == "train"
    ]
    used = sorted({f.distribution for f in functions})
    facts = {
        "key": key,
        "distributions": {d: {"version": inventory.versions[d], "licence": inventory.licences[d]} for d in used},
        "functions": {
            "found": len(functions),
            "executable": sum(f.executable for f in functions),
            "recorded": made.recorded,
            "pretrain": len(texts),
        },
    }
    texts.sort(key=lambda text: text.id)
    return _store(out, splits, {pack.PRETRAIN: pack.write(texts)}, facts)


def write_own(
    out: Path,
    splits: Mapping[str, Sequence[tuple[Any, Any]]],
    objects: Objects,
    others: Mapping[str, bytes] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a pack of problems that have passed the gate. `objects`: where the trees lie that they need. `others`: further files.
    `facts`: what the manifest says besides."""
    own = {split: list(problems) for split, problems in splits.items()}
    return _store(out, own, dict(others or {}), {**(facts or {}), "key": OWN}, objects)


def _store(
    out: Path,
    splits: dict[str, list[tuple[Any, Any]]],
    others: dict[str, bytes],
    facts: dict[str, Any],
    objects: Objects | None = None,
) -> dict[str, Any]:
    """The directory appears whole, in place of an older one, or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        folder = Path(name) / "pack"
        folder.mkdir()
        for split, problems in splits.items():
            problems.sort(key=lambda pair: pair[0].id)
            (folder / pack.file_name(split, "public")).write_bytes(pack.write(public for public, _ in problems))
            (folder / pack.file_name(split, "hidden")).write_bytes(pack.write(hidden for _, hidden in problems))
        for file, data in others.items():
            (folder / file).write_bytes(data)
        files = sorted(folder.iterdir())
        if objects is not None:
            for problems in splits.values():
                pack.keep_trees((public for public, _ in problems), objects, folder)
        manifest = {
            "format": FORMAT,
            "generator": GENERATOR,
            "python": platform.python_version(),
            "splits": {split: _counts(problems) for split, problems in splits.items()},
            "verified": True,
            "checksums": {path.name: _checksum(path) for path in files},
            **facts,
        }
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        if out.exists():
            shutil.move(out, Path(name) / "old")
        os.replace(folder, out)
    return manifest


def _checksum(path: Path) -> str:
    """As references to objects have it (xxh3-128)."""
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def _counts(problems: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    return {
        "problems": len(problems),
        "functions": len({public.cell for public, _ in problems}),
        "kinds": dict(sorted(Counter(getattr(hidden, "bug", public.kind) for public, hidden in problems).items())),
        "distributions": dict(sorted(Counter(public.origin.split(":")[0] for public, _ in problems).items())),
    }


def _refuse_others(out: Path) -> None:
    """What lies in `out` may be replaced: nothing, or a pack that `build` made, whole or not, of this format or another.
    Raises ValueError."""
    if not out.exists():
        return
    manifest = read_manifest(out) if out.is_dir() else None
    own = manifest is not None and manifest.get("key") == OWN
    others = (
        [out] if not out.is_dir() else [p for p in out.iterdir() if p.suffix != ".zst" and p.name != "manifest.json"]
    )
    if own or others:
        what = "imported problems" if own else "something that is no pack"
        raise ValueError(f"--out: found {what} in {out}; allowed: a new directory, or a pack made by this command")


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """None if there is no pack."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT else None


def _intact(folder: Path, manifest: dict[str, Any]) -> bool:
    for name, checksum in manifest["checksums"].items():
        path = folder / name
        if not path.is_file() or _checksum(path) != checksum:
            return False
    return True
