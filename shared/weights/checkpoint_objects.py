"""A Hugging Face checkpoint directory in the object store: every file an object, and a manifest that names them all.

The manifest is JSON, `{"format": "etude-checkpoint-1", "files": {name: {key, size, checksum}}}`, written last: a reader
sees a whole checkpoint or none. `RunConfig.base` refers to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import msgspec
import xxhash

from shared.contracts.run import Ref
from shared.objects import Objects
from shared.scratch import scratch
from shared.settings import Told
from shared.weights.fetching import fetchers

FORMAT = "etude-checkpoint-1"
MANIFEST = "checkpoint.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
SMALL = (".json", ".jinja", ".txt", ".model")  # configuration, card, tokenizer and chat template
KEPT = (*SMALL, ".safetensors")
TEMPLATES = "additional_chat_templates"  # the one folder that belongs to a checkpoint: named chat templates


class NotACheckpoint(ValueError):
    """The directory or the object is no checkpoint; the text says what is missing."""


class CheckpointObjects(msgspec.Struct, frozen=True, kw_only=True):
    format: str = FORMAT
    files: dict[str, Ref]


class NotUploaded(Told, OSError):
    """A file could not be read or stored; the text says which and why."""


def kept_files(directory: Path, kinds: Sequence[str] = KEPT) -> dict[str, Path]:
    """Return the files of a checkpoint by their names, as in `additional_chat_templates/tool_use.jinja`. Those are the files of
    `kinds` in the directory itself, and the templates in TEMPLATES. Left out is everything else that a training leaves there:
    earlier checkpoints, optimiser states, hidden files."""
    paths = [path for path in directory.glob("*") if path.suffix in kinds]
    paths += (directory / TEMPLATES).glob("*.jinja")
    return {
        path.relative_to(directory).as_posix(): path
        for path in sorted(paths)
        if path.is_file() and not path.name.startswith(".")
    }


def upload_directory(objects: Objects, prefix: str, directory: Path, *, weights: bool = True) -> Ref:
    """Upload the `kept_files` of a checkpoint and return the manifest's reference. Without `weights`, only those of SMALL.
    Raises NotACheckpoint, NotUploaded."""
    manifest = upload_files(objects, prefix, directory, KEPT if weights else SMALL)
    with _storing(directory, f"{prefix}/{MANIFEST}"):
        return objects.put(f"{prefix}/{MANIFEST}", manifest)


def upload_once(objects: Objects, prefix: str, directory: Path) -> Ref | None:
    """Upload a checkpoint as `upload_directory` does, unless the prefix has a manifest; None: it has one. Of uploads at the
    same time, one stores the manifest. Files lie below a folder named by their contents, so no upload writes over the files
    of another checkpoint."""
    checksums = sorted(checksums_of(directory).items())
    contents = xxhash.xxh3_128_hexdigest(msgspec.json.encode(checksums))
    manifest = upload_files(objects, f"{prefix}/{contents}", directory)
    with _storing(directory, f"{prefix}/{MANIFEST}"):
        return objects.put_if_absent(f"{prefix}/{MANIFEST}", manifest)


def upload_files(objects: Objects, prefix: str, directory: Path, kinds: Sequence[str] = KEPT) -> bytes:
    """Upload the files of `kinds` and return the manifest that names them. Raises NotACheckpoint, NotUploaded."""
    kept = kept_files(directory, kinds)
    if "config.json" not in kept:
        raise NotACheckpoint(f"{directory}: no config.json; expected a Hugging Face checkpoint directory")
    files: dict[str, Ref] = {}
    for name, path in kept.items():
        with _storing(directory, f"{prefix}/{name}"):
            files[name] = objects.put_file(f"{prefix}/{name}", path)
    return msgspec.json.encode(CheckpointObjects(files=files))


def checksums_of(directory: Path) -> dict[str, str]:
    """Return the checksum of each of a checkpoint's `kept_files`, as its manifest names it. No file is held in memory."""
    found = {}
    for name, path in kept_files(directory).items():
        with path.open("rb") as file:
            found[name] = hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
    return found


@contextmanager
def _storing(directory: Path, key: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotUploaded(f"{directory}: {key} cannot be stored: {error.strerror or error}") from error


def read_checkpoint(objects: Objects, ref: Ref) -> CheckpointObjects:
    try:
        checkpoint = msgspec.json.decode(objects.get(ref), type=CheckpointObjects)
    except msgspec.DecodeError as error:
        raise NotACheckpoint(f"{ref.key}: {error}") from None
    if checkpoint.format != FORMAT:
        raise NotACheckpoint(f"{ref.key}: format {checkpoint.format!r}; this reader knows {FORMAT!r}")
    for name in checkpoint.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not name:
            raise NotACheckpoint(f"{ref.key}: file name {name!r} leaves the directory")
    return checkpoint


def download_directory(objects: Objects, ref: Ref, directory: Path, *, weights: bool = True) -> Path:
    """Rebuilds the directory; returns it. Whole or not at all: the files appear together.

    A directory that exists is kept as it is: name it after the reference, e.g. by `ref.checksum`, and give one without
    weights (`weights=False`: configuration, tokenizer and card, all of them small) a place of its own."""
    if directory.exists():
        return directory
    checkpoint = read_checkpoint(objects, ref)
    with scratch(directory.parent, f".{directory.name}-") as folder:
        files = [(f, folder / name) for name, f in checkpoint.files.items() if weights or not name.endswith(WEIGHTS)]
        for _, path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
        with fetchers() as pool:
            for done in [pool.submit(objects.get_file, file, path) for file, path in files]:
                done.result()
        folder.chmod(0o755)
        try:
            folder.rename(directory)
        except OSError:
            if not directory.exists():  # else: another process was first
                raise
    return directory
