"""What the console reads from the object store: configurations, chat formats, problems with what their environments say of them,
trajectories and their routing, what graders found. Blocking; call it in a thread. What cannot be read becomes a sentence for
the page, not an error."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TypeVar

import msgspec
import numpy as np
import xxhash

from shared.attempts import newest_trajectory
from shared.contracts.graded import Graded, verdict_key
from shared.contracts.messages import AttemptKey
from shared.contracts.run import Ref, RunConfig
from shared.contracts.trajectory import Trajectory, routing_rows, unpack
from shared.environments import Brief, Places
from shared.environments.registry import Environments
from shared.objects import ObjectMissing, Objects
from shared.problems.pack import Lines, refs
from shared.problems.schema import Problem
from shared.renderers import Renderer
from shared.renderers.registry import load_renderer
from shared.weights.checkpoint_objects import download_directory

REMEMBERED = 4  # packs, formats and configurations of each kind
ROUTING_BYTES = 256 << 20  # of the routing that lies on the disk, unless one alone is larger: a pod's state has 512 MiB
GIVEN_BYTES = 128 << 20  # of what environments keep on the disk for problems, unless one problem alone has more
MAX_GIVEN = 32 << 20  # bytes of the objects that one problem needs: they are unpacked in memory

V = TypeVar("V")


class Library:
    def __init__(self, objects: Objects, formats: Path, routing_bytes: int = ROUTING_BYTES) -> None:
        self._objects = objects
        self._formats = formats
        self._routing, self._routing_bytes = formats.parent / "routing", routing_bytes
        self._given = formats.parent / "given"
        self._lock, self._giving = Lock(), Lock()
        self._values: OrderedDict[tuple[str, str], object] = OrderedDict()

    def config(self, run: str) -> RunConfig:
        """Raises ObjectMissing, ObjectDamaged, ValueError."""
        return self._once("config", run, lambda: self._config(run))

    def chat(self, run: str) -> Renderer:
        """The chat format of the run's base checkpoint. Raises what the store and the format raise."""
        base = self.config(run).base
        return self._once("chat", base.checksum, lambda: self._chat(base))

    def problem(self, pack: Ref, problem: str) -> Problem | None:
        """None if the pack does not hold it. Raises ObjectMissing, ObjectDamaged, and ValueError for a kind that is not known
        here."""
        problems: Lines[Problem] = self._once("pack", pack.checksum, lambda: Lines(self._objects.get(pack), Problem))
        try:
            return problems[problem]
        except KeyError:
            return None

    def brief(self, problem: Problem) -> Brief:
        """What the problem's environment tells an agent. Raises ValueError."""
        try:
            return Environments(Places(objects=self._objects)).of(problem).brief(problem)
        except Exception as error:  # an environment may be another package's code
            raise ValueError(f"kind {problem.kind!r:.80}: {type(error).__name__}: {error}") from None

    def given(self, problem: Problem, paths: Sequence[str]) -> Mapping[str, str]:
        """The text of these files as the problem gives them, of those that it has as text. Raises ValueError."""
        if (size := sum(ref.size for ref in refs(problem))) > MAX_GIVEN:
            raise ValueError(f"its objects have {size:,} bytes; the console unpacks at most {MAX_GIVEN:,}")
        folder = self._given / xxhash.xxh3_128_hexdigest(msgspec.json.encode(problem))
        with self._giving:  # one after the other: each may hold a whole tree in memory
            try:
                places = Places(objects=self._objects, cache=folder)
                found = Environments(places).of(problem).given(problem, tuple(paths))
            except Exception as error:  # an environment may be another package's code; the tree may be gone
                raise ValueError(f"kind {problem.kind!r:.80}: {type(error).__name__}: {error}") from None
            finally:
                if folder.exists():
                    os.utime(folder)
                    _make_room(self._given, GIVEN_BYTES, keep=folder)
        return found

    def trajectory(self, ref: Ref) -> Trajectory:
        """Raises ObjectMissing, ObjectDamaged, ValueError."""
        return unpack(self._objects.get(ref))

    def graded(self, run: str, key: AttemptKey, trajectory: Ref) -> Graded:
        """Return the verdict on the trajectory, or what a grader of an earlier release left of its epoch. Raises ObjectMissing,
        ObjectDamaged, ValueError."""
        try:
            ref = self._objects.head(verdict_key(run, key, trajectory))
        except ObjectMissing:
            ref = self._objects.head(verdict_key(run, key, None))
        return _decoded(self._objects.get(ref), Graded)

    def experts(self, ref: Ref, segment: int, first: int, count: int) -> np.ndarray:
        """[tokens, MoE layers, K] of tokens first .. first + count of a segment; the segment's last has none. The object is
        kept on the disk, as those before it are while there is room: a very long attempt's has 200 MB. Raises ObjectMissing,
        ObjectDamaged, ValueError."""
        # Whoever wrote the reference may have written a path for a checksum.
        file = self._routing / xxhash.xxh3_128_hexdigest(f"{ref.key} {ref.size} {ref.checksum}".encode())
        if not file.exists():
            self._routing.mkdir(parents=True, exist_ok=True)
            _make_room(self._routing, self._routing_bytes - ref.size)
            self._objects.get_file(ref, file)
        with file.open("rb") as source:
            return routing_rows(source, segment, first, count)

    def keep_config(self, config: RunConfig) -> Ref:
        """Never over another run's. Raises ValueError where there is one already."""
        key = f"runs/{config.run}/config.json"
        if (ref := self._objects.put_if_absent(key, msgspec.json.encode(config))) is None:
            raise ValueError(f"{key} is there already; try again")
        return ref

    def lacking(self, refs: Sequence[Ref]) -> str:
        """The first of these that is not in the store, by name alone: hidden parts are not ours to read. Empty: all are."""
        return next((ref.key for ref in refs if ref.key not in self._objects.list(ref.key)), "")

    def find_trajectory(self, run: str, attempt: str) -> Ref | None:
        """For an attempt that the board no longer holds: what its newest epoch has stored."""
        return newest_trajectory(self._objects, run, attempt)

    def _once(self, kind: str, key: str, make: Callable[[], V]) -> V:
        with self._lock:
            if (kind, key) in self._values:
                self._values.move_to_end((kind, key))
                return self._values[kind, key]  # type: ignore[return-value]
        value = make()
        with self._lock:
            self._values[kind, key] = value
            while sum(1 for k, _ in self._values if k == kind) > REMEMBERED:
                del self._values[next(k for k in self._values if k[0] == kind)]
        return value

    def _config(self, run: str) -> RunConfig:
        return _decoded(self._objects.get(self._objects.head(f"runs/{run}/config.json")), RunConfig)

    def _chat(self, base: Ref) -> Renderer:
        directory = self._formats / base.checksum
        return load_renderer(download_directory(self._objects, base, directory, weights=False))


def _decoded(data: bytes, kind: type[V]) -> V:
    """Raises ValueError, which msgspec's own error is not."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None


def _make_room(folder: Path, most: int, keep: Path | None = None) -> None:
    """Deletes the oldest files and folders in it until the others have `most` bytes or less; `keep` stays."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another page was faster
            found.append((path != keep, -path.stat().st_mtime_ns, _size(path), path))
    held = 0
    for _, _, size, path in sorted(found):
        held += size
        if held > most and path != keep:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files)
