"""Bases: an image of the engine with a name for the sandbox's user and the folders in which this user may write.

A base is made once per image and committed under a label with its digest. Every sandbox has a user of its own on the engine's
host, so its work directory is a copy that it owns: a base makes sure that everybody can read the image's.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import tarfile
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from shared.sandbox import SandboxUnavailable
from shared.sandbox.containers import bundle, labels, volumes
from shared.sandbox.containers.engine import Engine, missing, spoken_for
from shared.sandbox.containers.volumes import Entry
from shared.sandbox.inside.container import UID
from shared.sandbox.inside.layer import VOLUME

USER, HOME = "agent", "/home/agent"
WORKSPACE = "/workspace"
_FORMAT = "3"  # changes with what a base contains
_FRESH_S = 86400.0  # a base is used only if it will not expire before the sandbox does
_making = threading.Lock()
_TEMPORARY = ("tmp", "var/tmp")  # places where everybody may write
# Runs as root, without a network, before anything of the task runs.
_OPEN = """
import os, stat, sys
def show(path, more):
    mode = stat.S_IMODE(os.lstat(path).st_mode)
    if mode & more != more:
        os.chmod(path, mode | more)
for top in sys.argv[1:]:
    for where, folders, files in os.walk(top):
        show(where, 0o005)
        for name in files:
            path = os.path.join(where, name)
            if stat.S_ISREG(os.lstat(path).st_mode):
                show(path, 0o004)
"""


@dataclass(frozen=True, slots=True)
class Prepared:
    """`image`: id of the base. `workdir`: the work directory. `environment`: variables that the image sets."""

    image: str
    workdir: str
    environment: Mapping[str, str]

    @property
    def places(self) -> tuple[str, ...]:
        """Where the sandbox may write, the work directory first."""
        return tuple(dict.fromkeys((self.workdir, HOME, *(f"/{name}" for name in _TEMPORARY))))


def find(engine: Engine, reference: str, *, pull: bool = False) -> dict[str, Any]:
    """Return what the engine says of an image. Raises ValueError where there is none that runs here, SandboxUnavailable."""
    from docker.errors import APIError

    with spoken_for(f"image {reference}"):
        try:
            found = dict(engine.api.inspect_image(reference))
        except APIError as error:
            if not missing(error):
                raise
            found = _pulled(engine, reference) if pull else {}
    if not found:
        raise ValueError(
            f"image: found {reference!r}, which the engine does not have; docker pull {reference}, or docker load"
        )
    machine = f"{found.get('Os')}/{found.get('Architecture')}"
    if machine != f"linux/{engine.machine}":
        raise ValueError(
            f"image {reference}: found machine type {machine}; allowed: linux/{engine.machine}; "
            f"docker pull --platform linux/{engine.machine} {reference}"
        )
    return found


def _pulled(engine: Engine, reference: str) -> dict[str, Any]:
    from docker.errors import APIError

    try:
        return dict(engine.client.images.pull(reference).attrs)
    except APIError as error:
        if missing(error):
            return {}
        raise  # a rate limit, a registry that is away: ours


def prepared(engine: Engine, reference: str, *, pull: bool = False, workdir: str = "") -> Prepared:
    """Return the base for an image; make it if there is none. `workdir`: its work directory; empty: the image's own. Raises
    ValueError, SandboxUnavailable, OSError."""
    found = find(engine, reference, pull=pull)
    config = found.get("Config") or {}
    environment = dict(pair.split("=", 1) for pair in config.get("Env") or () if "=" in pair)
    own = str(PurePosixPath(config.get("WorkingDir") or "/"))
    workdir = workdir or (own if own != "/" else WORKSPACE)
    parts = (_FORMAT, str(found["Id"]), workdir, str(UID))
    key = hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
    with _making:
        image = _known(engine, key) or _made(engine, str(found["Id"]), key, workdir)
    return Prepared(image, workdir, environment)


def _known(engine: Engine, key: str) -> str | None:
    with spoken_for("bases"):
        listed = engine.api.images(filters={"label": [f"{labels.KIND}=base", f"{labels.DIGEST}={key}"]})
    soon = time.time() + _FRESH_S
    fresh = sorted(found["Id"] for found in listed if not labels.expired(found.get("Labels") or {}, soon))
    return fresh[0] if fresh else None


def _made(engine: Engine, image: str, key: str, workdir: str) -> str:
    """Make a base: the folders where they lack, everything in the work directory to be read, a name for the user."""
    python = volumes.volume(engine, bundle.bundle(), image)
    with spoken_for(f"a base from image {image}"):
        helper = _helper(engine, image, python, workdir)
        try:
            folders = [Entry(workdir.strip("/"), 0o755), Entry(HOME.strip("/"), 0o755)]
            folders += [Entry(name, 0o1777) for name in (*_TEMPORARY, VOLUME.strip("/"))]
            with tempfile.TemporaryFile() as spool:
                volumes.archive(folders, spool)
                spool.seek(0)
                engine.api.put_archive(helper, "/", spool)
            _name_user(engine, helper)
            engine.api.start(helper)
            code = int(engine.api.wait(helper, timeout=600)["StatusCode"])
            if code != 0:
                said = engine.api.logs(helper, tail=5).decode(errors="replace").strip()
                raise SandboxUnavailable(
                    f"a base from image {image}: its work directory {workdir} cannot be read: "
                    f"{said or f'exit code {code}'}"
                )
            made = engine.api.commit(
                helper,
                conf={"Labels": labels.labels("base", seconds=labels.CACHE_S, digest=key), "User": f"{UID}:{UID}"},
            )
            return str(made["Id"])
        finally:
            with contextlib.suppress(Exception):
                engine.api.remove_container(helper, force=True, v=True)


def _name_user(engine: Engine, container: str) -> None:
    """Give the sandbox's user a name: many programs ask for it. An image without a readable list of users goes without."""
    from docker.errors import APIError

    try:
        chunks, _ = engine.api.get_archive(container, "/etc/passwd")
    except APIError as error:
        if missing(error):
            return
        raise
    with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as tar:
        member = tar.next()
        file = tar.extractfile(member) if member is not None and member.isreg() else None
        if member is None or file is None:
            return
        lines = file.read().splitlines()
    if any(f":{UID}:".encode() in line for line in lines):
        return
    text = b"".join(line + b"\n" for line in [*lines, f"{USER}:x:{UID}:{UID}::{HOME}:/bin/sh".encode()])
    member.size, out = len(text), io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(member, io.BytesIO(text))
    engine.api.put_archive(container, "/etc", out.getvalue())


def _helper(engine: Engine, image: str, python: str, workdir: str) -> str:
    from docker.types import Mount

    config = engine.api.create_host_config(
        mounts=[Mount(bundle.HOME, python, type="volume", no_copy=True, read_only=True)],
        network_mode="none",
        cap_drop=["ALL"],
        cap_add=["FOWNER", "DAC_READ_SEARCH"],
        security_opt=["no-new-privileges"],
    )
    made = engine.api.create_container(
        image,
        bundle.script(_OPEN, workdir, HOME),
        entrypoint=[],
        user="0:0",
        name=labels.name("helper"),
        environment=bundle.CLEAN,
        host_config=config,
        healthcheck={"test": ["NONE"]},
        labels=labels.labels("helper", seconds=900.0),
    )
    return str(made["Id"])
