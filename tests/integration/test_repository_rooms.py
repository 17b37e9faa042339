"""Attempts in a root file system of their own, and with a network by policy."""

from __future__ import annotations

import asyncio
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shared.contracts.messages import Verdict
from shared.contracts.run import Sampling
from shared.contracts.trajectory import Submission
from shared.environments import Grading, InfrastructureError
from shared.environments.repository import RepositoryEnvironment
from shared.environments.repository.problem import RepositoryLimits
from shared.environments.repository.runtime import _LEFT_OUT
from shared.environments.repository.workspace import RepositoryWorkspace
from shared.sandbox import bases, connect_sandboxes
from shared.sandbox.any_loop import AnyLoopSandboxes
from shared.sandbox.bases.make import Source, make
from shared.sandbox.bubblewrap import interpreter, shared_libraries
from shared.sandbox.bubblewrap_sandboxes import BubblewrapSandboxes
from tests.contract.sandboxes import NO_BWRAP
from tests.laboratory import SOLUTION, Laboratory, call, hidden
from tests.patience import patient
from tests.unit.sandbox.rootfs_world import host_programs

pytestmark = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)


def add_python(root: Path) -> None:
    """Copy this interpreter to where it is found by its name."""
    library = Path(sysconfig.get_path("stdlib"))
    extensions = sorted(str(path) for path in (library / "lib-dynload").glob("*.so"))
    left_out = shutil.ignore_patterns(*_LEFT_OUT, "pydoc_data", "tkinter", "distutils")
    shutil.copytree(library, root / str(library)[1:], symlinks=True, ignore=left_out)
    for path in (str(interpreter()), *shared_libraries((str(interpreter()), *extensions))):
        target = root / path[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(path, target)
    (root / "usr/local/bin").mkdir(parents=True, exist_ok=True)
    (root / "usr/local/bin/python3").symlink_to(interpreter())


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Laboratory]:
    made = Laboratory(tmp_path)
    held = bases.Held(made.objects, tmp_path / "held")
    made.places = replace(made.places, bases=held, sandboxes=connect_sandboxes("bubblewrap", bases=held.folder))
    made.environment = RepositoryEnvironment(made.places)
    yield made
    assert made.places.sandboxes is not None
    asyncio.run(made.places.sandboxes.close())
    held.close()
    assert not any(base.held for base in bases.kept(tmp_path / "held"))


def test_an_attempt_and_its_grading_run_in_the_base_that_the_problem_names(lab: Laboratory, tmp_path: Path) -> None:
    root = tmp_path / "root"
    host_programs(root, ("sh", "bash", "cat"))
    (root / "etc").mkdir(exist_ok=True)
    (root / "etc/only-in-the-base").write_text("here")
    make(lab.objects, "bare", Source(folder=root), tmp_path / "making")
    with pytest.raises(InfrastructureError, match=r"no python3 of 3\.11 or later"):
        asyncio.run(lab.environment.open(lab.problem(image="base:bare"), Sampling()))
    add_python(root)
    make(lab.objects, "small", Source(folder=root), tmp_path / "making")
    problem = lab.problem(image="base:small", limits=RepositoryLimits(command_s=60.0, grading_s=120.0))

    async def scenario(box: RepositoryWorkspace) -> None:
        assert (await call(box, "read", path="/etc/only-in-the-base")).text == "     1\there"
        assert "No such file" in (await call(box, "read", path="/usr/bin/git")).text
        assert "1 passed" in (await call(box, "shell", command="pytest -q tests -p no:cacheprovider")).text
        await call(box, "edit", path="calc.py", old="a - b", new="a + b")
        assert list((await box.submission()).changes) == ["calc.py"]

    lab.within(scenario, problem)
    for changes, solved in ((SOLUTION, True), ({}, False)):
        item = Grading(problem, hidden(), Submission(changes=dict(changes)))
        (found,) = asyncio.run(lab.environment.grade([item]))
        assert isinstance(found, Verdict), found
        assert (found.solved, found.error) == (solved, "")
    asyncio.run(lab.environment.ready())


def test_an_attempt_reaches_allowed_hosts_alone_and_its_trajectory_says_which(lab: Laboratory) -> None:
    pytest.importorskip("cryptography", reason="the network of sandboxes is an extra: etude[egress]")
    from tests.integration.egress_world import SECRET, EgressProxy, forbidden, world

    fetch = (
        "python -c 'import urllib.request as u; print(u.urlopen(\"{}\", timeout=20).read().decode())' 2>&1 | tail -1"
    )

    async def run() -> None:
        async with asyncio.timeout(patient(120)), world() as made:
            adapter = BubblewrapSandboxes(
                lab.folder / "state",
                proxy=lambda network, name: EgressProxy(
                    network, name=name, resolve=made.resolve, forbidden=forbidden, trust=made.trust
                ),
            )
            sandboxes = AnyLoopSandboxes(adapter)
            credentials = {"index": made.network.credentials[0]}
            environment = RepositoryEnvironment(replace(lab.places, sandboxes=sandboxes, credentials=credentials))
            allow = [f"good.test:{made.http}", f"index.test:{made.http}"]
            problem = lab.problem(network={"allow": allow, "credentials": ["index"]})
            box = await environment.open(problem, Sampling())
            assert isinstance(box, RepositoryWorkspace)
            good, other, index = (f"http://{name}.test:{made.http}/" for name in ("good", "other", "index"))
            try:
                assert (await call(box, "shell", command=fetch.format(good))).text == "hello 0"
                assert "403" in (await call(box, "shell", command=fetch.format(other))).text
                assert "tiny" in (await call(box, "shell", command=fetch.format(f"{index}simple/tiny/"))).text
                assert SECRET not in (await call(box, "shell", command="env; cat /run/etude-network/*.pem")).text
                await call(box, "shell", command="kill -9 -1")  # the way out is out of reach
                assert (await call(box, "shell", command=fetch.format(good))).text == "hello 0"
                decided = [(one.host, one.allowed) for one in box.decisions]
            finally:
                await box.close()
                await sandboxes.close()
            assert decided == [("good.test", True), ("other.test", False), ("index.test", True), ("good.test", True)]

    asyncio.run(run())
