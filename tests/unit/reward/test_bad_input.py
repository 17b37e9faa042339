"""Bad input of a grading job is named, and everything else in the same job is graded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from services.reward import cli
from services.reward.grade import Grader
from services.reward.jobs import Item, Job
from shared import sandbox
from shared.contracts.graded import Graded
from shared.contracts.messages import AttemptKey
from shared.contracts.run import Ref
from shared.contracts.trajectory import Change, pack
from shared.environments import Places
from shared.environments.registry import Environments
from shared.environments.repository.problem import RepositoryHidden, RepositoryProblem
from shared.objects import Objects, connect
from shared.problems.pack import write
from tests.guard.problems import fixed
from tests.unit.reward.conftest import make

GONE = Ref(key="trees/gone", size=1, checksum="0" * 32)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    functions = sandbox.connect("process", 1)
    commands = sandbox.connect_sandboxes("bubblewrap")
    objects = connect(f"file:{tmp_path / 'objects'}")
    yield Places(functions=functions, sandboxes=commands, objects=objects, cache=tmp_path / "cache")
    functions.close_sync()


def item(objects: Objects, name: str, problem: str, packs: tuple[Ref, Ref], **files: object) -> Item:
    ref = objects.put(f"t/{name}", pack(make("edit", "submit", **files)))
    key = AttemptKey(attempt=name, epoch=0, group="g", problem=problem)
    return Item(run="r", key=key, trajectory=ref, pack=packs[0], pack_hidden=packs[1])


def test_a_checksum_that_differs_a_missing_base_and_an_unknown_problem_are_named_and_stop_no_other(
    places: Places,
) -> None:
    objects = places.objects
    assert objects is not None
    function, hidden = fixed()[0]
    tree = RepositoryProblem(id="repo", prompt="Mend it.", tree=GONE)
    tree_hidden = RepositoryHidden(id="repo", fail_to_pass=["t.py::t"], tests={"t.py": Change(text="def t(): pass\n")})
    packs = objects.put("pack", write([function, tree])), objects.put("hidden", write([hidden, tree_hidden]))
    files = {**function.files, **hidden.solution}

    good = item(objects, "good", function.id, packs, files=files)
    other = item(objects, "other", function.id, packs, files=files)
    swapped = msgspec.structs.replace(
        other, trajectory=msgspec.structs.replace(other.trajectory, checksum=good.trajectory.checksum[::-1])
    )
    lost = msgspec.structs.replace(item(objects, "lost", function.id, packs, files=files), trajectory=GONE)
    baseless = item(objects, "baseless", "repo", packs, files={}, changes={"a.py": Change(text="x = 1\n")})
    unknown = item(objects, "unknown", "nobody's", packs, files=files)

    grader = Grader(objects, Environments(places), "g")
    answer = grader.work(Job(answer_key="grading/a", items=[swapped, lost, baseless, unknown, good]))
    checksum, missing, base, problem, graded = answer.results
    assert str(checksum).startswith("Unreadable: ObjectDamaged")
    assert str(missing).startswith("Unreadable: ObjectMissing")
    assert "trees/gone" in str(base)
    assert "nobody's" in str(problem)
    assert isinstance(graded, Graded)
    assert graded.verdict.solved


@pytest.mark.parametrize("method", ["given", "brief"])
def test_an_environment_that_breaks_stops_no_attempt_of_another_kind(
    places: Places, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    objects = places.objects
    assert objects is not None
    function, hidden = fixed()[0]
    tree = RepositoryProblem(id="repo", prompt="Mend it.", tree=GONE)
    packs = (
        objects.put("pack", write([function, tree])),
        objects.put("hidden", write([hidden, RepositoryHidden(id="repo", fail_to_pass=["t.py::t"])])),
    )
    good = item(objects, "good", function.id, packs, files={**function.files, **hidden.solution})
    broken = item(objects, "broken", "repo", packs, files={})
    environments = Environments(places)
    environment = environments.named("repository")
    monkeypatch.setattr(environment, "given", lambda problem, paths: {})
    monkeypatch.setattr(environment, method, lambda *given: {}["lost"])
    said, graded = Grader(objects, environments, "g").work(Job(answer_key="grading/a", items=[broken, good])).results
    assert said == "InfrastructureError: environment 'repository': KeyError: 'lost'"
    assert isinstance(graded, Graded)
    assert graded.verdict.solved


def test_a_term_that_is_named_twice_in_one_file_is_refused_by_name(state: Path) -> None:
    text = '{"reward": {"behaviour": {"no_submit": -0.1, "style": -0.1, "no_submit": 0.5}}}'
    (state / "new.json").write_text(text)
    (state / "new.toml").write_text("[reward.behaviour]\nno_submit = -0.1\nno_submit = 0.5\n")
    for name in ("new.json", "new.toml"):
        done = CliRunner().invoke(cli.alone, ["r-1", "--config", str(state / name), "--state", str(state)])
        assert done.exit_code == 2
        assert f"--config {state / name}: not " in done.output
    done = CliRunner().invoke(cli.alone, ["r-1", "--config", str(state / "new.json"), "--state", str(state)])
    assert "'no_submit' is named twice" in done.output
