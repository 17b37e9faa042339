"""`etude inference …`: look at a replica from outside."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer

from shared import objects as stores
from shared.contracts.ids import policy_prefix
from shared.objects import ObjectMissing
from shared.settings import ServiceSettings, load
from shared.weights import WeightsError, read_manifest

app = typer.Typer(no_args_is_help=True, help="Checksums and state of the engines.")
TIMEOUT_S = 60


@app.callback()
def _group() -> None:
    """Keeps `checksum` a subcommand although it is the only one."""


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
        objects = stores.connect(load(ServiceSettings, []).objects_url)
        ref = objects.head(f"{policy_prefix(run, serial)}/manifest.json")
        report["manifest"] = read_manifest(objects, ref).checksum
    except ObjectMissing:
        report["reason"] = f"run {run!r} has no manifest of version {serial}"
    except WeightsError as error:
        report["reason"] = str(error)
    report["equal"] = report["manifest"] == report["live"]
    print(json.dumps(report))
    raise typer.Exit(0 if report["equal"] else 1)


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        return json.load(response)
