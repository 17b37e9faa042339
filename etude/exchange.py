"""`etude export` and `etude import`: policies to and from Hugging Face directories.

Invariants:
- What is exported is, bit for bit, the version that was published: every tensor is checked against its manifest.
- A directory appears whole or not at all, and none that holds something is written to.
- What is imported has every tensor that its architecture asks for, in its shape, finite, and a tokenizer and chat format that
  fit: a run that starts from it does not find out later. It is stored in bf16, once: a name is never given to other weights.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from shared.contracts.ids import policy_prefix
from shared.contracts.run import Ref, RunConfig
from shared.formats import Format
from shared.formats import card as cards
from shared.formats.registry import CARD, FORMATS, load_format
from shared.objects import ObjectDamaged, ObjectMissing, Objects
from shared.settings import Told
from shared.weights import WeightsError, highest_serial, read_manifest, rebuild
from shared.weights.checkpoint_objects import (
    MANIFEST,
    SMALL,
    NotACheckpoint,
    download_directory,
    read_checkpoint,
    upload_directory,
)
from shared.weights.directory import write_tensors

STORED = "checkpoints"  # where imported ones lie in the object store
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")
PAD, EOS = "<pad>", "<eos>"


class NotExchanged(Told, ValueError):
    """Nothing was written; the text says what was found, what is allowed and what to do."""


@dataclass(frozen=True, slots=True)
class Exported:
    run: str
    serial: int
    step: int
    tensors: int
    directory: Path


@dataclass(frozen=True, slots=True)
class Imported:
    """`new`: False where the same weights had this name before. `notes`: what a person should know."""

    name: str
    ref: Ref
    parameters: int
    new: bool
    notes: tuple[str, ...]


# Out


def export_run(objects: Objects, run: str, out: Path, version: int | None = None) -> Exported:
    """One published version of a run, the newest unless `version` says otherwise. Raises NotExchanged."""
    config = _config(objects, run)
    newest = highest_serial(objects, run)
    if newest < 0:
        raise NotExchanged(f"run {run}: no version is published yet")
    serial = newest if version is None else version
    try:
        ref = objects.head(f"{policy_prefix(run, serial)}/manifest.json") if 0 <= serial <= newest else None
    except ObjectMissing:
        ref = None
    if ref is None:
        raise NotExchanged(f"run {run}: version {serial} is not in the store; published: 0 to {newest}")
    try:
        manifest, tensors = read_manifest(objects, ref), rebuild(objects, ref)
    except WeightsError as error:
        raise NotExchanged(f"run {run}, version {serial}: {error}") from None
    with _whole(out) as folder:
        _base_files(objects, config.base, folder)
        write_tensors(tensors, folder)
        card = _read_card(folder)
        card = {name: card[name] for name in ("format", "context") if name in card}
        card |= {"parent": f"{run}@{serial}", "run": run, "serial": serial, "step": manifest.step}
        _write_json(folder / CARD, {**card, "checksum": manifest.checksum})
        _complete(folder)
        about = f"Version {serial} (step {manifest.step}) of run {run}, trained with Étude from {config.base.key}."
        (folder / "README.md").write_text(f"{about}\n\nTensors: {len(tensors)}, checksum {manifest.checksum}.\n")
    return Exported(run, serial, manifest.step, len(tensors), out)


def export_stored(objects: Objects, name: str, out: Path) -> Path:
    """An imported checkpoint, as it lies in the store. Raises NotExchanged."""
    with _whole(out) as folder:
        shutil.copytree(
            download_directory(objects, stored(objects, name), folder / ".download"), folder, dirs_exist_ok=True
        )
        shutil.rmtree(folder / ".download")
        _complete(folder)
    return out


def _config(objects: Objects, run: str) -> RunConfig:
    try:
        return msgspec.json.decode(objects.get(objects.head(f"runs/{run}/config.json")), type=RunConfig)
    except (ObjectMissing, ValueError):
        imported = f"`{STORED}/{run}` is one" if run in _names(objects) else f"which is written {STORED}/NAME"
        raise NotExchanged(
            f"{run}: neither a directory with a config.json, nor a run of this object store, nor an imported checkpoint of it, "
            f"{imported}; ETUDE_STATE or ETUDE_OBJECTS names the store"
        ) from None


def _base_files(objects: Objects, base: Ref, folder: Path) -> None:
    """Configuration and tokenizer: training changes neither."""
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            _copy_small(download_directory(objects, base, Path(scratch) / "base", weights=False), folder)
    except (ObjectMissing, ObjectDamaged, NotACheckpoint) as error:
        raise NotExchanged(f"the base {base.key} cannot be read: {error}") from None


def _copy_small(source: Path, target: Path) -> None:
    """Indices of shards are written anew."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in SMALL and not path.name.endswith(".index.json") and path.name[0] != ".":
            shutil.copyfile(path, target / path.name)


def _complete(folder: Path) -> None:
    """What loaders look for and a base of ours does not have: how to read the tokenizer, where a generation ends."""
    config = json.loads((folder / "config.json").read_text())
    card = _read_card(folder)
    tokenizer = folder / "tokenizer.json"
    if tokenizer.exists() and not (folder / "tokenizer_config.json").exists():
        try:
            special = {token["content"] for token in json.loads(tokenizer.read_text()).get("added_tokens", [])}
        except (ValueError, AttributeError, KeyError, TypeError) as error:
            raise NotExchanged(f"{tokenizer.name}: no tokenizer ({type(error).__name__}: {error})") from None
        about: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": card.get("context") or config.get("max_position_embeddings"),
        }
        about |= {name: token for name, token in (("pad_token", PAD), ("eos_token", EOS)) if token in special}
        _write_json(folder / "tokenizer_config.json", about)
    if card.get("format") in FORMATS and not (folder / "generation_config.json").exists():
        chat = _check_format(folder, config["vocab_size"])
        _write_json(folder / "generation_config.json", {"eos_token_id": list(chat.stop_tokens), "do_sample": True})


# In


def import_directory(
    objects: Objects, directory: Path, *, name: str = "", chat: str = "", context: int = 0
) -> Imported:
    """Checks a Hugging Face directory and stores it as `checkpoints/<name>`, which a run can start from. `chat`, `context`:
    what its etude.json would say, where it has none. Raises NotExchanged."""
    directory = directory.resolve()
    name = name or directory.name
    if not NAME.fullmatch(name):
        raise NotExchanged(f"--name: found {name!r}; allowed: letters, digits, '.', '_' and '-', 80 at most")
    with tempfile.TemporaryDirectory(prefix="etude-import-") as scratch:
        folder = Path(scratch) / "checkpoint"
        folder.mkdir()
        checked = check(directory)
        _copy_small(directory, folder)
        _card(folder, chat, context, checked.positions)
        _check_format(folder, checked.vocabulary)
        parameters = _normalised(directory, folder)
        ref, new = _store(objects, name, folder)
    return Imported(name, ref, parameters, new, checked.notes)


def export_directory(directory: Path, out: Path) -> Path:
    """A checkpoint that lies in a directory, in bf16 and with all that loaders look for. Raises NotExchanged."""
    check(directory)
    with _whole(out) as folder:
        _copy_small(directory, folder)
        _normalised(directory, folder)
        _complete(folder)
    return out


@dataclass(frozen=True, slots=True)
class Checked:
    vocabulary: int
    positions: int
    notes: tuple[str, ...]


def check(directory: Path) -> Checked:
    """Whether the files hold what their config.json asks for, in dtypes that are read and with numbers alone, and its card fits.
    No model is made: every tensor is looked at by itself, and only once all else is right. Raises NotExchanged."""
    from shared.model.checkpoint import READ, copies, expected_shapes, not_finite, other_than, stored_tensors
    from shared.model.config import ModelConfig, UnknownModel

    try:
        config = ModelConfig.load(directory)
        context_of(_read_card(directory), config.max_position_embeddings)
        wanted, found = expected_shapes(config), stored_tensors(directory)
    except UnknownModel as error:
        raise _located(directory, error) from None
    mtp = tuple(f"model.layers.{config.num_hidden_layers + i}." for i in range(config.num_mtp_layers))
    notes: tuple[str, ...] = ()
    if mtp and not any(name.startswith(mtp) for name in found):
        notes = ("it has no MTP tensors although config.json names such layers: they begin at random",)
        wanted = {name: shape for name, shape in wanted.items() if not name.startswith(mtp)}
    # Copies of others, and tables of angles, which follow from config.json: some save them all the same.
    spare = {name: original for name, original in copies(config).items() if name in found and original in found}
    strange = sorted(n for n in found.keys() - wanted.keys() - spare.keys() if not n.endswith("rotary_emb.inv_freq"))
    missing = sorted(wanted.keys() - found.keys())
    wrong = sorted(name for name in wanted.keys() & found.keys() if wanted[name] != found[name].shape)
    unread = sorted(name for name in wanted.keys() & found.keys() if found[name].dtype not in READ.values())
    kind = f"{directory}: not a whole {config.model_type}"
    if missing:
        instead = f"; found instead: {len(strange)}, the first is {strange[0]!r}" if strange else ""
        raise NotExchanged(f"{kind}: {len(missing)} tensors are missing, the first is {missing[0]!r}{instead}")
    if wrong:
        raise NotExchanged(
            f"{kind}: {len(wrong)} tensors have another shape than config.json asks for, the first is {wrong[0]!r}: "
            f"{found[wrong[0]].shape}, asked for {wanted[wrong[0]]}"
        )
    if strange:
        raise NotExchanged(
            f"{kind}: {len(strange)} tensors that this architecture does not have, the first is {strange[0]!r}; merge adapters "
            "and undo quantisation before"
        )
    if unread:
        raise NotExchanged(
            f"{directory}: {len(unread)} tensors are of a dtype that is not read, the first is {unread[0]!r}: "
            f"{found[unread[0]].dtype}; allowed: {', '.join(READ.values())}"
        )
    try:
        bad, other = not_finite(directory, wanted), other_than(directory, spare)
    except UnknownModel as error:
        raise _located(directory, error) from None
    if bad:
        raise NotExchanged(f"{directory}: {len(bad)} tensors are not finite in bf16, the first is {bad[0]!r}")
    if other:
        tied = " (tie_word_embeddings: false in config.json, if it is the head)" if other[0] == "lm_head.weight" else ""
        raise NotExchanged(
            f"{directory}: {other[0]!r} differs from {spare[other[0]]!r}, which would stand in its place; allowed: the same "
            f"numbers{tied}"
        )
    return Checked(config.vocab_size, config.max_position_embeddings, notes)


def _normalised(directory: Path, folder: Path) -> int:
    """Writes config.json and the weights in bf16 into `folder`. Returns the number of parameters."""
    import torch

    from shared.model import load_checkpoint, published_tensors, save_checkpoint

    with torch.random.fork_rng():
        torch.manual_seed(0)  # of what the files do not have: the same files are the same checkpoint
        model = load_checkpoint(directory, torch.bfloat16)
    save_checkpoint(model, folder, torch.bfloat16)
    return sum(tensor.numel() for tensor in published_tensors(model).values())


def _card(folder: Path, chat: str, context: int, positions: int) -> None:
    card = _read_card(folder)
    named = card.get("format") or chat
    if chat and named != chat:
        raise NotExchanged(f"--format {chat}: its etude.json says {named!r}")
    if named not in FORMATS:
        found = (
            f"etude.json names the chat format {named!r}" if named else "it has no etude.json that names a chat format"
        )
        raise NotExchanged(
            f"{found}; allowed: {', '.join(sorted(FORMATS))}; where it speaks one of them: --format NAME"
        )
    holds = context_of({**card, "context": context} if context else card, positions)
    _write_json(folder / CARD, {**card, "format": named, "context": holds})


def _located(directory: Path, error: Exception) -> NotExchanged:
    """What is wrong with a file says itself where that lies; what is wrong with a configuration does not."""
    said = str(error)
    return NotExchanged(said if said.startswith(str(directory)) else f"{directory}: {said}")


def context_of(card: dict[str, Any], positions: int) -> int:
    """Tokens of a context: those that the card says, else as many as the model has positions. Raises NotExchanged."""
    from shared.formats.compact import SMALLEST_CONTEXT

    try:
        return cards.context_of(card, SMALLEST_CONTEXT, positions) or positions
    except cards.BadCard as error:
        raise NotExchanged(str(error)) from None


def _check_format(folder: Path, vocabulary: int) -> Format:
    try:
        chat = load_format(folder)
    except ValueError as error:
        raise NotExchanged(f"its chat format cannot be read: {str(error).replace(f'{folder}/', '')}") from None
    if chat.vocab_size > vocabulary:
        raise NotExchanged(
            f"tokenizer.json has {chat.vocab_size} tokens; config.json has room for {vocabulary} (vocab_size)"
        )
    return chat


def _store(objects: Objects, name: str, folder: Path) -> tuple[Ref, bool]:
    """A name is given once: what runs started from stays what it was."""
    try:
        there = objects.head(f"{STORED}/{name}/{MANIFEST}")
    except ObjectMissing:
        return upload_directory(objects, f"{STORED}/{name}", folder), True
    known = {path: file.checksum for path, file in read_checkpoint(objects, there).files.items()}
    mine = {path.name: xxhash.xxh3_128_hexdigest(path.read_bytes()) for path in folder.iterdir()}
    if known != mine:
        raise NotExchanged(
            f"{STORED}/{name} holds another checkpoint, which runs may have started from; give another --name"
        )
    return there, False


def stored(objects: Objects, name: str) -> Ref:
    """The imported checkpoint of this name. Raises NotExchanged naming those that there are."""
    name = name.removeprefix(f"{STORED}/")
    try:
        if NAME.fullmatch(name):
            return objects.head(f"{STORED}/{name}/{MANIFEST}")
    except ObjectMissing:
        pass
    there = ", ".join(_names(objects)) or "none"
    raise NotExchanged(f"{STORED}/{name}: no such checkpoint; there are: {there}. `etude import DIR` adds one")


def _names(objects: Objects) -> list[str]:
    return sorted({key.split("/")[1] for key in objects.list(f"{STORED}/") if key.endswith(f"/{MANIFEST}")})


# Files


def _read_card(folder: Path) -> dict[str, Any]:
    try:
        card = json.loads((folder / CARD).read_text())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise NotExchanged(f"{CARD}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise NotExchanged(f"{CARD}: not JSON ({error})") from None
    if not isinstance(card, dict):
        raise NotExchanged(f"{CARD}: found {type(card).__name__}; allowed: a JSON object")
    if not isinstance(card.get("format"), str | None):
        raise NotExchanged(f"{CARD}: format: found {card['format']!r:.80}; allowed: {', '.join(sorted(FORMATS))}")
    return card


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` when nothing went wrong."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise NotExchanged(f"--out {out}: there is something already; give a directory that does not exist or is empty")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield folder
        folder.chmod(0o755)
        if out.exists():
            out.rmdir()
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
