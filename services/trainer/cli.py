"""`etude weights …`: do engines, manifests and the trainer's masters agree, bit for bit?"""

from __future__ import annotations

import importlib.util
import json
import sys
import urllib.request
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
import typer

from shared import direct, neighbours, weights
from shared import objects as stores
from shared.contracts.ids import policy_prefix
from shared.contracts.run import Ref, RunConfig
from shared.objects import ObjectMissing, Objects
from shared.settings import ServiceSettings, load

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Verify published weights.")
TIMEOUT_S = 60
Run = Annotated[str, typer.Option("--run", help="The run; empty: the newest one in the object store.")]
State = Annotated[Path, typer.Option("--state", help="Directory for everything local.", envvar="ETUDE_STATE")]


@app.callback()
def group() -> None:
    """One command for now; still `etude weights verify`."""


@app.command()
def verify(
    run: Run = "",
    engine: Annotated[
        list[str] | None, typer.Option(help="Base URL of an engine; left out: all that run here.")
    ] = None,
    state: State = Path(".etude"),
) -> None:
    """Every engine's live weights against the manifest of the version that it says it serves; the newest version rebuilt
    from its chain; and bf16 of the masters in the trainer's newest checkpoint against their manifest.

    Prints one JSON object a line. Exit code 0: all equal; 1: something differs, or an engine does not answer; 2: nothing to
    compare. An engine that serves nothing that was published has nothing to be compared with ("equal": null).
    """
    settings = _settings(state)
    objects = stores.connect(settings.objects_url)
    run = run or _newest_run(objects)
    lines = [_verify_engine(objects, url) for url in (engine or _engines(settings))]
    lines += [_verify_chain(objects, run), _verify_masters(objects, run, settings.state / "trainer")]
    for line in lines:
        print(json.dumps(line))
    compared = [line for line in lines if line["equal"] is not None]
    unasked = [line for line in lines if line.get("answers") is False]
    raise typer.Exit(2 if not compared else 0 if all(line["equal"] for line in compared) and not unasked else 1)


def _settings(state: Path) -> ServiceSettings:
    return load(ServiceSettings, []).model_copy(update={"state": state})


def _newest_run(objects: Objects) -> str:
    """Ids sort by start."""
    runs = {key.split("/")[1] for key in objects.list("runs/") if key.endswith("/config.json")}
    if not runs:
        print("no run in the object store; start one first (etude demo)", file=sys.stderr)
        raise typer.Exit(2)
    return max(runs)


def _config(objects: Objects, run: str) -> RunConfig:
    data = objects.get(objects.head(f"runs/{run}/config.json"))
    return msgspec.json.decode(data, type=RunConfig)


def _engines(settings: ServiceSettings) -> list[str]:
    """Those that run: of one that was killed on this machine the file may still be there."""
    found = [one for one in neighbours.find(settings) if one.service == "inference"]
    return [one.url for one in found if not one.pid or Path(f"/proc/{one.pid}").exists() or not _here(one.url)]


def _here(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "localhost")


def _manifest(objects: Objects, run: str, serial: int) -> tuple[Ref, weights.Manifest]:
    ref = objects.head(f"{policy_prefix(run, serial)}/manifest.json")
    return ref, weights.read_manifest(objects, ref)


def _verify_engine(objects: Objects, url: str) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url.rstrip('/')}/weights_checker", b'{"action": "checksum"}', {"Content-Type": "application/json"}
    )
    line: dict[str, Any] = {"what": "engine", "url": url, "equal": None, "answers": False}
    try:
        with direct.ask(request, TIMEOUT_S) as response:
            live = json.load(response)
        line["answers"] = True
        if not live["run"]:
            return line | {
                "reason": "it serves a checkpoint (ETUDE_CHECKPOINT), and no run's version that was published"
            }
        manifest = _manifest(objects, live["run"], live["serial"])[1]
    except (OSError, ValueError, ObjectMissing) as error:
        return line | {"reason": str(error)}
    line |= {"run": live["run"], "serial": live["serial"], "found": live["checksum"], "expected": manifest.checksum}
    return line | {"equal": live["checksum"] == manifest.checksum}


def _verify_chain(objects: Objects, run: str) -> dict[str, Any]:
    serial = weights.highest_serial(objects, run)
    line: dict[str, Any] = {"what": "chain", "run": run, "serial": serial, "equal": None}
    if serial < 0:
        return line | {"reason": "nothing was published"}
    try:
        ref, manifest = _manifest(objects, run, serial)
        found = weights.checksum(weights.rebuild(objects, ref))
    except weights.WeightsError as error:
        return line | {"equal": False, "reason": str(error)}
    return line | {"found": found, "expected": manifest.checksum, "equal": found == manifest.checksum}


def _verify_masters(objects: Objects, run: str, cache: Path) -> dict[str, Any]:
    line: dict[str, Any] = {"what": "masters", "run": run, "equal": None}
    if importlib.util.find_spec("torch") is None:
        return line | {"reason": "torch is not installed here; ask where the trainer runs"}
    from services.trainer import checkpoints, masters
    from shared.model import ModelConfig
    from shared.weights.checkpoint_objects import download_directory

    try:
        resume = checkpoints.find(objects, run, cache)
    except checkpoints.NoneUsable as error:
        return line | {"equal": False, "reason": str(error)}
    if resume.checkpoint is None or resume.state is None:
        return line | {"reason": "no step checkpoint yet"}
    base = _config(objects, run).base
    shape = ModelConfig.load(download_directory(objects, base, cache / "base" / base.checksum))
    bits = masters.published_bits(masters.model_from_state(shape, resume.state))
    manifest = _manifest(objects, run, resume.checkpoint.serial)[1]
    found = weights.checksum(bits)
    line |= {"serial": manifest.serial, "step": resume.step, "found": found, "expected": manifest.checksum}
    return line | {"equal": found == manifest.checksum}
