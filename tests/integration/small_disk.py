"""`python -m tests.integration.small_disk STORE FOLDER`, in a mount namespace of its own: a store on a disk of 8 MiB that
is filled, and freed again. Exit code 0: a clear error meanwhile, nothing lost, and it goes on by itself."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from shared import bus as buses
from shared import ledger
from shared import objects as stores
from shared.contracts.messages import Alert
from shared.contracts.topics import Topic
from tests.patience import patient

TOPIC = Topic("t", (Alert,), partitions=4)
BIG = "x" * 50_000


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Not a byte is left."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"\0" * 4096):
            pass
    try:
        yield
    finally:
        filler.unlink()


def alert(what: str) -> Alert:
    return Alert(run="r", name="n", severity="info", what=what)


async def bus(folder: Path) -> None:
    log = buses.connect(f"sqlite:{folder / 'bus.db'}", client="c")
    try:
        for i in range(20):
            await log.publish(TOPIC, str(i), alert(f"{i} {BIG}"))
        with full(folder):
            refused = 0
            for i in range(20, 40):
                try:
                    await log.publish(TOPIC, str(i), alert(f"{i} {BIG}"))
                except buses.BusUnavailable as error:
                    refused += 1
                    said("full", error)
            assert refused, "a full disk took everything"
        await log.publish(TOPIC, "after", alert("99 after"))
        seen: set[int] = set()
        deliveries = log.deliveries([TOPIC], "g", 100)
        async with asyncio.timeout(patient(30)):
            while not set(range(20)) | {99} <= seen:
                delivery = await anext(deliveries)
                seen.add(int(delivery.message.what.split()[0]))
                delivery.done()
    finally:
        await log.close()
    _whole(folder / "bus.db")


async def record(folder: Path) -> None:
    url = f"sqlite:///{folder / 'ledger.db'}"
    engine = ledger.connect(url)
    ledger.upgrade(engine)
    insert = text("INSERT INTO lease (name, holder, term, renewals) VALUES (:n, :h, 1, 0)")
    with engine.begin() as connection:
        connection.execute(insert, {"n": "before", "h": BIG})
    with full(folder):
        refused = False
        for i in range(40):
            try:
                with engine.begin() as connection:
                    connection.execute(insert, {"n": f"meanwhile {i}", "h": BIG})
            except DBAPIError as error:
                refused = True
                said("full", error)
        assert refused, "a full disk took everything"
    with engine.begin() as connection:
        connection.execute(insert, {"n": "after", "h": BIG})
        names = set(connection.execute(text("SELECT name FROM lease")).scalars())
    assert {"before", "after"} <= names
    engine.dispose()
    _whole(folder / "ledger.db")


async def objects(folder: Path) -> None:
    store = stores.connect(f"file:{folder / 'objects'}")
    before = store.put("a/before", b"b" * 100_000)
    with full(folder):
        try:
            store.put("a/meanwhile", b"m" * 1_000_000)
        except OSError as error:
            said("space", error)
        else:
            raise AssertionError("a full disk took everything")
        assert store.get(before) == b"b" * 100_000
    assert list(store.list("a/")) == ["a/before"], "half an object is left"
    after = store.put("a/after", b"a" * 1_000_000)
    assert store.get(after) == b"a" * 1_000_000


async def base(folder: Path) -> None:
    """A run's checkpoint, on its way to a replica whose disk is full: whole or not at all."""
    from shared.weights.checkpoint_objects import download_directory, upload_directory

    with tempfile.TemporaryDirectory() as elsewhere:
        store, checkpoint = stores.connect(f"file:{elsewhere}/objects"), Path(elsewhere) / "checkpoint"
        checkpoint.mkdir()
        (checkpoint / "config.json").write_text("{}")
        (checkpoint / "model.safetensors").write_bytes(b"w" * 1_000_000)
        ref = upload_directory(store, "base", checkpoint)
        (folder / "bases").mkdir()
        with full(folder):
            try:
                download_directory(store, ref, folder / "bases" / "b")
            except OSError as error:
                said("space", error)
            else:
                raise AssertionError("a full disk took everything")
            assert not list((folder / "bases").iterdir()), "half a checkpoint is left"
        there = download_directory(store, ref, folder / "bases" / "b")
        assert (there / "model.safetensors").stat().st_size == 1_000_000


async def version(folder: Path) -> None:
    """A version, written for SGLang to load: whole or not at all, and what is there already stays."""
    import numpy as np

    from services.inference.sglang import files
    from shared.model.config import ModelConfig

    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
    }
    model = ModelConfig.from_dict({"model_type": "qwen3", "vocab_size": 8192, "intermediate_size": 64, **shape})
    tensors = {"model.embed_tokens.weight": np.ones((8192, 64), np.uint16)}
    files.write(folder / "0", tensors, model, {}, fp8=False, draft=False)
    with full(folder):
        try:
            files.write(folder / "1", tensors, model, {}, fp8=False, draft=False)
        except OSError as error:
            said("space", error)
        else:
            raise AssertionError("a full disk took everything")
        assert sorted(path.name for path in folder.iterdir()) == ["0", "filler"], "half a version is left"
    files.write(folder / "1", tensors, model, {}, fp8=False, draft=False)
    one, other = ((folder / name / "model-00000.safetensors").read_bytes() for name in "01")
    assert one == other


def said(word: str, error: Exception) -> None:
    if word not in str(error):
        raise AssertionError(f"an error that does not speak of {word!r}: {error!r}")


def _whole(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


STORES = {"bus": bus, "ledger": record, "objects": objects, "base": base, "version": version}


def main(store: str, folder: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], check=True)
    asyncio.run(STORES[store](folder))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
