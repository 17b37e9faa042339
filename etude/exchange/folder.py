"""Checkpoint directories as we write them.

Invariants:
- A directory appears whole or not at all, and none that holds something is written to.
- It has all that loaders look for.
"""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etude.exchange.card import accepts, check_format, read_card, write_json
from etude.exchange.checking import Checked
from etude.exchange.errors import NotExchanged
from shared.output import require_folder
from shared.weights.checkpoint_objects import SMALL, kept_files

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # of errors that name no file
PAD, EOS = "<pad>", "<eos>"


@contextmanager
def whole(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` when nothing went wrong."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise NotExchanged(f"--out {out}: there is something already; give a directory that does not exist or is empty")
    require_folder(out, "--out")
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield folder
        folder.chmod(0o755)
        if out.exists():
            out.rmdir()
        folder.rename(out)
    except OSError as error:  # of this folder; what reads the source names that
        if not str(error.filename or "").startswith(str(folder)) and error.errno not in NO_ROOM:
            raise
        raise NotExchanged(
            f"--out {out}: cannot be written: {error.strerror}; make room, or give a folder elsewhere"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def copy_small(source: Path, target: Path) -> None:
    """Copy all small files but the indices of shards, which `normalised` writes."""
    for name, path in kept_files(source, SMALL).items():
        if not name.endswith(".index.json"):
            (target / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target / name)


def normalised(directory: Path, folder: Path, checked: Checked) -> int:
    """Write config.json and the weights in bf16 into `folder`. Returns the number of parameters."""
    from shared.model.checkpoint import copy_checkpoint

    if checked.whole:
        copy_checkpoint(directory, folder)
    else:
        _with_random_layers(directory, folder)
    return checked.parameters


def _with_random_layers(directory: Path, folder: Path) -> None:
    """The MTP layers that the files lack begin at random: the same for the same files, which are the same checkpoint."""
    import torch

    from shared.model import load_checkpoint, save_checkpoint

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = load_checkpoint(directory, torch.bfloat16)
    save_checkpoint(model, folder, torch.bfloat16)


def complete(folder: Path) -> None:
    """What loaders look for and a base of ours does not have: how to read the tokenizer, where a generation ends."""
    config = json.loads((folder / "config.json").read_text())
    card = read_card(folder)
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
        write_json(folder / "tokenizer_config.json", about)
    chat = check_format(folder, config["vocab_size"]) if accepts(card.get("format") or "") else None
    if chat is not None and not (folder / "generation_config.json").exists():
        write_json(folder / "generation_config.json", {"eos_token_id": list(chat.stop_tokens), "do_sample": True})
