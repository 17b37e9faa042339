"""What a service says of a problem's image and network before it opens a sandbox."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shared.contracts.run import Ref
from shared.environments import InfrastructureError, Places
from shared.environments.repository import RepositoryEnvironment, rooms
from shared.environments.repository.problem import RepositoryProblem
from shared.objects.directory import DirectoryObjects
from shared.sandbox import SandboxUnavailable, bases, connect_sandboxes, gateway
from shared.sandbox.contract import Credential

INDEX = {"index": Credential("index.example.org", "Authorization", "Bearer x")}


def problem(**fields: Any) -> RepositoryProblem:
    return RepositoryProblem(
        **{"id": "p", "prompt": "Do it.", "tree": Ref(key="trees/x", size=0, checksum=""), **fields}
    )


def places(tmp_path: Path, kind: str = "bubblewrap", **fields: Any) -> Places:
    objects = DirectoryObjects(tmp_path / "objects")
    held = bases.Held(objects, tmp_path / "cache")
    return Places(sandboxes=connect_sandboxes(kind, bases=held.folder), objects=objects, bases=held, **fields)


@pytest.mark.parametrize(
    ("kind", "image", "default", "said"),
    [
        ("bubblewrap", "", "", None),
        ("bubblewrap", "base:py311", "", None),
        ("bubblewrap", "", "base:py311", None),
        ("bubblewrap", "py311", "", "field 'image': found 'py311'; allowed: base:NAME, base:DIGEST, docker:REFERENCE"),
        ("bubblewrap", "docker:node", "", "needs ETUDE_SANDBOX=docker"),
        ("docker", "docker:node", "", None),
        ("docker", "", "docker:node", None),
        ("docker", "", "", "allowed with ETUDE_SANDBOX=docker: docker:REFERENCE, here or in ETUDE_SANDBOX_IMAGE"),
        ("docker", "base:py311", "", "allowed with ETUDE_SANDBOX=docker: docker:REFERENCE"),
    ],
)
def test_an_image_that_the_adapter_has_not_is_refused_by_name(
    tmp_path: Path, kind: str, image: str, default: str, said: str | None
) -> None:
    found = RepositoryEnvironment(places(tmp_path, kind, image=default)).objection(problem(image=image))
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ("none", None),
        (["pypi.org", "*.example.org"], None),
        ({"allow": ["index.example.org:443"], "credentials": ["index"]}, None),
        ("all", "field 'network': found 'all'; allowed: 'none', a list of hosts"),
        (["127.0.0.1"], "field 'network.allow[0]': found '127.0.0.1' (an IP address; names only)"),
        ({"allow": ["x.org"], "credentials": ["other"]}, "found 'other'; allowed: 'index'"),
    ],
)
def test_a_network_that_cannot_be_is_refused_by_name(tmp_path: Path, network: Any, said: str | None) -> None:
    pytest.importorskip("h11", reason="the network of sandboxes is an extra: etude[egress]")
    found = rooms.objection(places(tmp_path, credentials=INDEX), problem(network=network))
    assert found is None if said is None else said in str(found)


def test_an_adapter_without_a_network_refuses_hosts_and_a_service_without_secrets_takes_names_of_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("h11", reason="the network of sandboxes is an extra: etude[egress]")
    docker = places(tmp_path, "docker", image="docker:x")
    assert rooms.objection(docker, problem(network=["pypi.org"])) is None
    named = problem(network={"allow": ["index.example.org"], "credentials": ["index"]})
    assert rooms.objection(places(tmp_path), named) is None
    with pytest.raises(InfrastructureError, match=r"this worker has no credentials.*ETUDE_SANDBOX_CREDENTIALS"):
        rooms.network(places(tmp_path), named)
    monkeypatch.setattr(gateway, "possible", lambda: False)  # as without the extra
    without = places(tmp_path, "docker", image="docker:x")
    assert "sandboxes (docker) have no network" in str(rooms.objection(without, problem(network=["pypi.org"])))


def test_a_base_that_does_not_exist_fails_the_attempt_before_it_begins_and_the_canary(tmp_path: Path) -> None:
    here = places(tmp_path, image="base:none", cache=tmp_path / "environments")
    with pytest.raises(InfrastructureError, match=r"none.*etude sandbox base"):
        asyncio.run(rooms.furnished(here, problem()))
    with pytest.raises(SandboxUnavailable, match=r"none.*etude sandbox base"):
        asyncio.run(RepositoryEnvironment(here).ready())
