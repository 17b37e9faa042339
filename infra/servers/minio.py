"""MinIO, built once from its Go module (its makers publish no programs any more)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

from infra.servers import CACHE, Unavailable, alone, require_fetching, say
from infra.servers.go import find_go
from infra.servers.place import Launch, Place
from shared import direct

MODULE = "github.com/minio/minio"
VERSION = "v0.0.0-20260212201848-7aac2a2c5b7c"  # no release tag resolves as a module; this is the newest commit
RELEASED = "2026-02-12T20-18-48Z"  # of that commit; the program wants to know its own age
USER = "etude"
BUCKET = "etude"


class Minio:
    name = "minio"
    ports = 1

    program = CACHE / f"minio-{VERSION.rpartition('-')[2]}"  # there after `install`

    def install(self) -> str:
        if not self.program.exists():
            require_fetching("minio")
            with alone("minio"):
                if not self.program.exists():
                    _build(self.program)
        return RELEASED

    def prepare(self, place: Place) -> None:
        place.data.mkdir(exist_ok=True)

    def launch(self, place: Place) -> Launch:
        arguments = [str(self.program), "server", "--quiet", "--address", f"127.0.0.1:{place.port}"]
        variables = {
            "MINIO_ROOT_USER": USER,
            "MINIO_ROOT_PASSWORD": place.secret,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
            "HOME": str(place.folder),  # it keeps certificates there
        }
        return Launch([*arguments, str(place.data)], variables, signal.SIGTERM)

    def ready(self, place: Place) -> bool:
        with direct.ask(f"http://127.0.0.1:{place.port}/minio/health/cluster", 2) as answer:
            return answer.status == 200

    def settings(self, place: Place) -> dict[str, str]:
        return {
            "ETUDE_OBJECTS": f"s3://{BUCKET}@127.0.0.1:{place.port}",
            "ETUDE_S3_ACCESS_KEY": USER,
            "ETUDE_S3_SECRET_KEY": place.secret,
        }


def _build(target: Path) -> None:
    go = find_go("minio")
    say("building MinIO from its Go module (once; a few minutes)")
    started = time.monotonic()
    work = target.with_name(f".{target.name}")
    shutil.rmtree(work, ignore_errors=True)
    package = f"{MODULE}/cmd"
    time_of_release = re.sub(r"T(\d+)-(\d+)-(\d+)Z", r"T\1:\2:\3Z", RELEASED)
    stamps = {"Version": time_of_release, "ReleaseTag": f"DEVELOPMENT.{RELEASED}", "CopyrightYear": RELEASED[:4]}
    flags = " ".join(["-s", "-w", *(f"-X {package}.{name}={value}" for name, value in stamps.items())])
    done = subprocess.run(
        [str(go), "install", "-trimpath", "-ldflags", flags, f"{MODULE}@{VERSION}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd="/",  # no module of ours around
        env={**os.environ, "GOBIN": str(work), "CGO_ENABLED": "0"},
    )
    if done.returncode:
        raise Unavailable(f"minio: it cannot be built with {go}: {done.stdout.strip()[-800:]}")
    (work / "minio").rename(target)
    work.rmdir()
    say(f"MinIO built in {time.monotonic() - started:.0f} s")
