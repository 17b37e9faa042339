"""What the console reads from the object store: configurations, chat formats, problems, trajectories and their routing, what
graders found. Blocking; call it in a thread. What cannot be read becomes a sentence for the page, not an error."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import TypeVar

import msgspec
import numpy as np
import xxhash

from shared.contracts.graded import Graded, verdict_key
from shared.contracts.ids import attempt_prefix
from shared.contracts.messages import AttemptKey
from shared.contracts.run import Ref, RunConfig
from shared.contracts.trajectory import Trajectory, routing_rows, unpack
from shared.formats import Format
from shared.formats.registry import load_format
from shared.objects import Objects
from shared.problems import Problem
from shared.problems.pack import Lines
from shared.weights.checkpoint_objects import download_directory

REMEMBERED = 4  # packs, formats and configurations of each kind
ROUTING_BYTES = 256 << 20  # of the routing that lies on the disk, unless one alone is larger: a pod's state has 512 MiB

V = TypeVar("V")


class Library:
    def __init__(self, objects: Objects, formats: Path, routing_bytes: int = ROUTING_BYTES) -> None:
        self._objects = objects
        self._formats = formats
        self._routing, self._routing_bytes = formats.parent / "routing", routing_bytes
        self._lock = Lock()
        self._values: OrderedDict[tuple[str, str], object] = OrderedDict()

    def config(self, run: str) -> RunConfig:
        """Raises ObjectMissing, ObjectDamaged, ValueError."""
        return self._once("config", run, lambda: self._config(run))

    def chat(self, run: str) -> Format:
        """The chat format of the run's base checkpoint. Raises what the store and the format raise."""
        base = self.config(run).base
        return self._once("chat", base.checksum, lambda: self._chat(base))

    def problem(self, pack: Ref, problem: str) -> Problem | None:
        """None if the pack does not hold it."""
        problems = self._once("pack", pack.checksum, lambda: Lines(self._objects.get(pack), Problem))
        try:
            return problems[problem]
        except KeyError:
            return None

    def trajectory(self, ref: Ref) -> Trajectory:
        """Raises ObjectMissing, ObjectDamaged, ValueError."""
        return unpack(self._objects.get(ref))

    def graded(self, run: str, key: AttemptKey) -> Graded:
        """What a grader left of the attempt. Raises ObjectMissing, ObjectDamaged, ValueError."""
        return _decoded(self._objects.get(self._objects.head(verdict_key(run, key))), Graded)

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
        prefix = attempt_prefix(run, attempt, 0).rsplit("/", 1)[0] + "/"
        keys = [key for key in self._objects.list(prefix) if key.rsplit("/", 1)[1].startswith("trajectory")]
        epochs = {int(key[len(prefix) :].split("/", 1)[0]): key for key in keys}
        return self._objects.head(epochs[max(epochs)]) if epochs else None

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

    def _chat(self, base: Ref) -> Format:
        directory = self._formats / base.checksum
        return load_format(download_directory(self._objects, base, directory, weights=False))


def _decoded(data: bytes, kind: type[V]) -> V:
    """Raises ValueError, which msgspec's own error is not."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None


def _make_room(folder: Path, most: int) -> None:
    """Deletes the oldest files until the others have `most` bytes or less."""
    found = []
    for file in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another page was faster
            found.append((-file.stat().st_mtime_ns, file.stat().st_size, file))
    held = 0
    for _, size, file in sorted(found):
        held += size
        if held > most:
            file.unlink(missing_ok=True)
