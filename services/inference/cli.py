"""`etude inference …`: look at a replica from outside, and at how SGLang would be started."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

from shared import direct
from shared import objects as stores
from shared.contracts.ids import policy_prefix
from shared.objects import ObjectMissing
from shared.settings import ServiceSettings, load
from shared.weights import WeightsError, read_manifest

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Checksums of the engines, SGLang's command line.")
TIMEOUT_S = 60


@app.command()
def checksum(url: Annotated[str, typer.Argument(help="Base URL of a replica, e.g. http://127.0.0.1:8400")]) -> None:
    """The checksum of the replica's live weights against the manifest of the version that it says it serves.

    Prints one JSON object. Exit code 0: equal; 1: different or not to be verified; 2: the replica does not answer.
    """
    try:
        live = _post(f"{url.rstrip('/')}/weights_checker", {"action": "checksum"})
    except (urllib.error.URLError, OSError, ValueError) as error:
        print(f"{url}: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    run, serial = live["run"], live["serial"]
    report: dict[str, Any] = {"url": url, "run": run, "serial": serial, "live": live["checksum"], "manifest": None}
    try:
        if run:
            objects = stores.connect(load(ServiceSettings, []).objects_url)
            ref = objects.head(f"{policy_prefix(run, serial)}/manifest.json")
            report["manifest"] = read_manifest(objects, ref).checksum
        else:
            report["reason"] = "it serves a checkpoint (ETUDE_CHECKPOINT), and no run's version that has a manifest"
    except ObjectMissing:
        report["reason"] = f"run {run!r} has no manifest of version {serial}"
    except WeightsError as error:
        report["reason"] = str(error)
    report["equal"] = report["manifest"] == report["live"]
    print(json.dumps(report))
    raise typer.Exit(0 if report["equal"] else 1)


@app.command()
def flags(
    checkpoint: Annotated[
        Path, typer.Argument(help="Folder with the config.json of the model that is to be served.", show_default=False)
    ],
) -> None:
    """The command that ETUDE_ENGINE=sglang starts SGLang with, from the ETUDE_SGLANG_… settings, for version 0 of a run.

    Needs neither SGLang nor a GPU. Exit code 2: settings that cannot go together; each is named, with what is allowed.
    """
    from services.inference.checkpoint import context_of  # torch is behind these, and `checksum` needs none of it
    from services.inference.config import InferenceSettings
    from services.inference.sglang import flags as composed
    from shared.model.config import ModelConfig, UnknownModel

    settings = load(InferenceSettings, [])
    try:
        model = ModelConfig.load(checkpoint)
        launch = composed.launch(
            settings,
            model,
            folder=str(settings.sglang_folder / (settings.name or "NAME") / "1" / "0"),
            port=settings.sglang_port or "PORT",
            serial=0,
            context=settings.context or context_of(checkpoint) or model.max_position_embeddings,
            queue_limit=settings.queue_limit,
        )
    except composed.FlagsRefused as error:
        for reason in error.reasons:
            print(f"setting {reason}", file=sys.stderr)
        raise typer.Exit(2) from None
    except UnknownModel as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from None
    print(launch.shell())


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with direct.ask(request, TIMEOUT_S) as response:
        return json.load(response)
