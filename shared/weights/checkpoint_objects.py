"""A Hugging Face checkpoint directory in the object store: every file an object, and a manifest that names them all.

The manifest is JSON, `{"format": "etude-checkpoint-1", "files": {name: {key, size, checksum}}}`, written last: a reader
sees a whole checkpoint or none. `RunConfig.base` refers to it.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import msgspec

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


class NotACheckpoint(ValueError):
    """The directory or the object is no checkpoint; the text says what is missing."""


class CheckpointObjects(msgspec.Struct, frozen=True, kw_only=True):
    format: str = FORMAT
    files: dict[str, Ref]


class NotUploaded(Told, OSError):
    """A file could not be read or stored; the text says which and why."""


def upload_directory(objects: Objects, prefix: str, directory: Path, *, weights: bool = True) -> Ref:
    """Uploads what services read of a checkpoint; returns the manifest's reference. That is the files of KEPT's kinds in
    `directory` itself, not what else a training leaves there: earlier checkpoints, optimiser states, hidden files. Without
    `weights` those of SMALL. Raises NotACheckpoint, NotUploaded."""
    kinds = KEPT if weights else SMALL
    paths = sorted(p for p in directory.glob("*") if p.suffix in kinds and p.name[0] != "." and p.is_file())
    if not any(path.name == "config.json" for path in paths):
        raise NotACheckpoint(f"{directory}: no config.json; expected a Hugging Face checkpoint directory")
    files: dict[str, Ref] = {}
    key = ""
    try:
        for path in paths:
            key = f"{prefix}/{path.name}"
            files[path.name] = objects.put_file(key, path)
        key = f"{prefix}/{MANIFEST}"
        return objects.put(key, msgspec.json.encode(CheckpointObjects(files=files)))
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
