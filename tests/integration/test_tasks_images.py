"""`etude tasks images`: what tasks need is found without an engine; with one, images are built once and open as sandboxes."""

from __future__ import annotations

import asyncio
import json
import secrets
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.curator.cli import app
from services.curator.recipes import recipes
from shared.sandbox.containers import building, engine
from shared.sandbox.containers.building import BuildRefused, Recipe
from shared.sandbox.containers.sandboxes import ContainerSandboxes
from shared.sandbox.contract import Base, Limits
from tests import docker_engine


def harbor(folder: Path, name: str, dockerfile: str | None, facts: str = 'version = "1.0"\n') -> Path:
    """Return a Harbor task, as far as its image goes."""
    (folder / name / "environment").mkdir(parents=True)
    (folder / name / "task.toml").write_text(facts)
    if dockerfile is not None:
        (folder / name / "environment" / "Dockerfile").write_text(dockerfile)
    return folder / name


def run(*arguments: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["images", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("FROM python:3.11\n", [(1, "python:3.11")]),
        ("# syntax=x\n\nfrom --platform=linux/amd64 a:1 as one\nFROM one\nFROM b\n", [(3, "a:1"), (5, "b")]),
        ("ARG TAG=bookworm\nFROM debian:${TAG}\n", [(2, "debian:bookworm")]),
        ("FROM \\\n  debian\nRUN echo \\\n  FROM nothing\n", [(1, "debian")]),
        ("FROM scratch\n", []),
    ],
)
def test_a_dockerfile_tells_the_images_that_it_begins_with(text: str, found: list[tuple[int, str]]) -> None:
    assert building.starts(text) == found


def test_a_dockerfile_without_an_image_is_refused() -> None:
    with pytest.raises(BuildRefused, match="found no FROM"):
        building.starts("RUN true\n")
    with pytest.raises(BuildRefused, match=r"line 2: .*: found an ARG without a value"):
        building.starts("ARG X\nFROM $X\n")


def test_tasks_and_rows_tell_what_their_images_are_made_from(tmp_path: Path) -> None:
    harbor(tmp_path / "tasks", "one", "FROM a\n")
    harbor(tmp_path / "tasks", "none", None)
    harbor(tmp_path / "tasks", "named", None, '[environment]\ndocker_image = "b:1"\n')
    found = dict(recipes(tmp_path / "tasks"))
    assert found["one"] == Recipe("one", tmp_path / "tasks" / "one" / "environment", "FROM a\n")
    assert found["named"] == Recipe("named", image="b:1")
    assert "environment/Dockerfile: is missing" in str(found["none"])

    rows = tmp_path / "rows.jsonl"
    listed = [
        {"instance_id": "x-1", "dockerfile": "FROM c\n"},
        {"instance_id": "x-2", "image_name": "d"},
        {"instance_id": "x-3"},
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in listed))
    (tmp_path / "files" / "x-3").mkdir(parents=True)
    (tmp_path / "files" / "x-3" / "Dockerfile").write_text("FROM e\n")
    found = dict(recipes(rows))
    assert (found["x-1"], found["x-2"]) == (Recipe("x-1", dockerfile="FROM c\n"), Recipe("x-2", image="d"))
    assert "--dockerfiles FOLDER with x-3/Dockerfile" in str(found["x-3"])
    assert dict(recipes(rows, tmp_path / "files"))["x-3"] == Recipe("x-3", tmp_path / "files" / "x-3", "FROM e\n")


def test_without_an_engine_the_command_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    task = harbor(tmp_path, "one", "FROM a\nRUN true\n")
    code, _, errors = run(task)
    assert (code, "does not answer; start it" in " ".join(errors.split())) == (2, True)
    code, said, _ = run(task, "--dry-run")
    assert (code, said) == (0, "one: is built from a\n")


def test_images_are_built_once_and_open_as_sandboxes(tmp_path: Path) -> None:
    docker_engine.need()
    salt = secrets.token_hex(6)
    begin = f"FROM {docker_engine.image()}\n"
    made = harbor(tmp_path, "made", f"{begin}WORKDIR /app\nCOPY . .\nRUN echo {salt} > made; chmod 600 made\n")
    (made / "environment" / "given").write_text("from the task\n")
    (made / "environment" / "secret").write_text("not to be copied\n")
    (made / "environment" / ".dockerignore").write_text("secret\n")
    harbor(tmp_path, "fails", f"{begin}RUN echo {salt} before; exit 3\n")
    harbor(tmp_path, "lacks", "FROM etude-test/missing:1\n")
    code, said, _ = run(tmp_path, "--network", "none", "--out", tmp_path / "images.json")
    images = json.loads((tmp_path / "images.json").read_text())
    try:
        assert (code, list(images)) == (1, ["made"])
        assert "exit 3' returned a non-zero code: 3" in said
        assert f"\n  {salt} before" in said
        assert "lacks: failed: Dockerfile, line 1: FROM etude-test/missing:1" in said
        assert run(tmp_path, "--only", "made")[:2] == (0, f"made: {images['made']} there already\n")

        async def scenario() -> bytes:
            adapter = ContainerSandboxes(warm=0)
            try:
                sandbox = await adapter.open(Base(images["made"]), Limits(memory_mb=128, disk_mb=64, seconds=300.0))
                session = await sandbox.session()
                return (await session.run("pwd; ls; cat given made; echo more >> made; cat made", time_s=60.0)).stdout
            finally:
                await adapter.close()

        shown = asyncio.run(scenario()).decode()
        assert shown == f"/app\nDockerfile\ngiven\nmade\nfrom the task\n{salt}\n{salt}\nmore\n"
    finally:
        found = engine.connect()
        for image in images.values():
            found.client.images.remove(image.removeprefix("docker:"), force=True)
        found.close()
