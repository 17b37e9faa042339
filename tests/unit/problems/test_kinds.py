"""Problems of other kinds than functions: their lines, their packs, and what a bad one is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.run import Ref
from shared.contracts.trajectory import Change
from shared.environments import registry
from shared.environments.repository import trees
from shared.environments.repository.problem import RepositoryHidden, RepositoryLimits, RepositoryProblem
from shared.objects.directory import DirectoryObjects
from shared.problems import Case, FunctionHidden, FunctionProblem, Hidden, Problem, ProblemError, parse_line
from shared.problems import pack as packs
from shared.problems.importing import import_jsonl
from shared.problems.schema import Limits

TEST = "from add import add\n\n\ndef test_add():\n    assert add(2, 2) == 4\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n"
LINE: dict[str, Any] = {
    "id": "add-1",
    "kind": "repository",
    "category": "debugging",
    "prompt": "add(2, 2) gives 0.",
    "tree": "tree",
    "limits": {"turns": 20, "memory_mb": 512},
    "hidden": {
        "fail_to_pass": ["tests/test_add.py::test_add"],
        "pass_to_pass": ["tests/test_add.py::test_zero"],
        "tests": {"tests/test_add.py": TEST},
        "solution": {"add.py": "def add(a, b):\n    return a + b\n"},
    },
}
PATCH = """\
--- a/add.py
+++ b/add.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tree/pkg").mkdir(parents=True)
    (tmp_path / "tree/add.py").write_text("def add(a, b):\n    return a - b\n")
    (tmp_path / "tree/pkg/run.sh").write_text("#!/bin/sh\n")
    return tmp_path


def written(folder: Path, *lines: dict[str, Any]) -> Path:
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def changed(**hidden: Any) -> dict[str, Any]:
    return {"hidden": LINE["hidden"] | hidden}


def test_a_repository_line_is_read_with_its_tree_as_an_object(folder: Path) -> None:
    objects = DirectoryObjects(folder / "objects")
    (pair,) = import_jsonl(written(folder, LINE), objects)
    problem, hidden = pair
    assert isinstance(problem, RepositoryProblem)
    assert (problem.limits.turns, problem.limits.memory_mb, problem.network) == (20, 512, "none")
    assert trees.texts(trees.decode(objects.get(problem.tree)), ["add.py"])["add.py"].endswith("a - b\n")
    assert hidden.tests == {"tests/test_add.py": Change(text=TEST)}
    assert hidden.solution == {"add.py": Change(text="def add(a, b):\n    return a + b\n")}


def test_a_solution_may_be_a_diff_of_the_tree(folder: Path) -> None:
    objects = DirectoryObjects(folder / "objects")
    as_text = import_jsonl(written(folder, LINE), objects)
    assert import_jsonl(written(folder, LINE | changed(solution=PATCH)), objects) == as_text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": " \n"}, "field 'prompt': is empty; allowed: an instruction"),
        (
            {"docker_image": "x:1"},
            "field 'docker_image': found 'x:1'; allowed: the field 'image'",
        ),
        (
            {"image": "docker.io/x@sha256:1"},
            "field 'image': found 'docker.io/x@sha256:1'; allowed: base:NAME",
        ),
        ({"network": "host"}, "field 'network': found 'host'; allowed: 'none'"),
        ({"tree": "nowhere"}, "field 'tree': found 'nowhere': .*nowhere: cannot be read"),
        ({"tree": "problems.jsonl"}, "field 'tree': .*no archive that is known"),
        ({"tree": None}, "field 'tree': found None; allowed: a path to a folder"),
        ({"tree": {"key": "trees/x", "size": 1, "checksum": "0"}}, "found no object 'trees/x' beside the file"),
        ({"base_commit": "abc"}, "field 'base_commit': not known; did you mean 'commit'"),
        ({"workdir": "../x"}, "field 'workdir': found '../x': has a part"),
        ({"workdir": "src"}, "field 'workdir': found 'src'; allowed: a folder of the tree"),
        ({"setup": ["make", ""]}, r"field 'setup\[1\]': found ''; allowed: a shell command"),
        ({"limits": {"memory": 3}}, "field 'limits.memory': not known; did you mean 'limits.memory_mb'"),
        ({"limits": {"memory_mb": 3}}, "field 'limits.memory_mb': found 3; allowed: 64 to 1048576"),
        ({"limits": {"turns": "many"}}, "field 'limits.turns': found 'many'; allowed: a whole number"),
        ({"hidden": []}, r"field 'hidden': found \[\]; allowed for kind 'repository': an object with fail_to_pass, "),
        (changed(runner="jest"), "field 'hidden.runner': found 'jest'; allowed: 'pytest'"),
        (changed(fail_to_pass=[]), "field 'hidden.fail_to_pass': is empty; allowed: the tests that fail before"),
        ({"hidden": {}}, "field 'hidden.fail_to_pass': is missing"),
        (changed(fail_to_pass=None), "field 'hidden.fail_to_pass': found None; allowed: a list"),
        (
            changed(fail_to_pass=["test_add"]),
            r"'hidden.fail_to_pass\[0\]': found 'test_add'; allowed: path/of/test_file.py::name",
        ),
        (
            changed(fail_to_pass=["t/x.py::test_a"]),
            "a test in a file of `tests` or of the tree, which have no 't/x.py'",
        ),
        (changed(fail_to_pass=["tests/test_add.py::test_zero"]), "which stands in fail_to_pass as well"),
        (changed(pass_to_pas=[]), "field 'hidden.pass_to_pas': not known; did you mean 'hidden.pass_to_pass'"),
        (changed(tests={"../x.py": "1"}), r"field 'hidden.tests\[../x.py\]': has a part"),
        (changed(tests={"x.py": 5}), r"field 'hidden.tests\[...\]': found"),
        (
            changed(protected=["/etc/*"]),
            r"field 'hidden.protected\[0\]': found '/etc/\*'; allowed: a pattern of relative paths",
        ),
        (changed(solution="no diff"), "field 'hidden.solution': found no file in it; allowed: a unified diff"),
        (
            changed(solution=PATCH.replace("a - b", "a * b")),
            "'add.py': the lines of the hunk at line 1 do not stand there",
        ),
    ],
)
def test_a_bad_field_is_named_with_its_line(folder: Path, change: dict[str, Any], words: str) -> None:
    path = written(folder, LINE, {**LINE, "id": "other", **change})
    with pytest.raises(ProblemError, match=words) as caught:
        import_jsonl(path, DirectoryObjects(folder / "objects"))
    assert "line 2: " in str(caught.value)
    assert "line 1: " not in str(caught.value)


def test_a_line_without_a_tree_is_told_what_one_may_be(folder: Path) -> None:
    line = {name: value for name, value in LINE.items() if name != "tree"}
    with pytest.raises(ProblemError, match="line 1: field 'tree': is missing; allowed: a path to a folder"):
        import_jsonl(written(folder, line), DirectoryObjects(folder / "objects"))


def test_a_tree_with_links_that_leave_it_is_refused(folder: Path) -> None:
    (folder / "tree/out").symlink_to("../../etc/passwd")
    with pytest.raises(
        ProblemError, match=r"line 1: field 'tree': .*'out': links to '../../etc/passwd', which leaves the tree"
    ):
        import_jsonl(written(folder, LINE), DirectoryObjects(folder / "objects"))


# --- packs -----------------------------------------------------------------------------------------------------------------

FUNCTION = FunctionProblem(
    id="f", files={"a.py": "x"}, entry="x", visible=[Case(args="[]", expected="1")], limits=Limits(time_s=1.0)
)
TREE = Ref(key="trees/0.tar.zst", size=1, checksum="0")
REPOSITORY = RepositoryProblem(id="r", prompt="p", tree=TREE, limits=RepositoryLimits(turns=3))
SECRETS = [
    FunctionHidden(id="f", cases=[]),
    RepositoryHidden(id="r", fail_to_pass=["t.py::a"], tests={"t.py": Change(text="")}),
]


def test_a_pack_of_several_kinds_gives_each_line_as_its_kind() -> None:
    public, hidden = packs.write([FUNCTION, REPOSITORY]), packs.write(SECRETS)
    assert packs.read_problems(public) == [FUNCTION, REPOSITORY]
    assert packs.read_hidden(hidden) == SECRETS
    assert packs.Lines(public, Problem)["r"] == REPOSITORY
    assert packs.Lines(hidden, Hidden)["r"] == SECRETS[1]
    with pytest.raises(packs.PackError, match="line 2"):
        packs.read_problems(public, FunctionProblem)
    unknown = packs.write([msgspec.structs.replace(FUNCTION, kind="riddle")])  # type: ignore[arg-type]
    with pytest.raises(
        packs.PackError, match=r"line 1: field 'kind': found 'riddle'; allowed: agent, function, repository"
    ):
        packs.read_problems(unknown)


def test_the_bytes_of_function_packs_are_what_they_were() -> None:
    lines = packs.decompress(packs.write([FUNCTION, SECRETS[0]])).decode().splitlines()
    assert lines == [
        '{"id":"f","kind":"function","category":"debugging","prompt":"","cell":"","origin":"","licence":"","files":{"a.py":"x"},'
        '"entry":"x","visible":[{"args":"[]","expected":"1"}],"actual":[],"limits":{"time_s":1.0,"memory_mb":512},"image":"",'
        '"base_commit":""}',
        '{"id":"f","cases":[],"solution":{},"bug":""}',
    ]


def test_functions_alone_load_nothing_of_repositories(tmp_path: Path) -> None:
    (tmp_path / "pack").write_bytes(packs.write([FUNCTION]))
    code = (
        "import sys; from pathlib import Path; from shared.problems import pack\n"
        "assert pack.read_problems(Path(sys.argv[1]).read_bytes())\n"
        "assert not [name for name in sys.modules if name.startswith('shared.environments')], sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "pack")], check=True)


def test_trees_go_with_their_pack_to_the_store_once(folder: Path) -> None:
    here, there = DirectoryObjects(folder / "here"), DirectoryObjects(folder / "there")
    pairs = import_jsonl(written(folder, LINE, LINE | {"id": "add-2"}), here)
    problems = [problem for problem, _ in pairs]
    pack = folder / "pack"
    packs.keep_trees(problems, here, pack)
    packs.upload_trees(problems, pack, there)
    packs.upload_trees(problems, pack, there)
    assert list(there.list("trees/")) == [problems[0].tree.key]
    assert there.get(problems[0].tree) == here.get(problems[0].tree)
    # A line that was exported is read again beside the trees of its pack.
    (pack / "problems.jsonl").write_text("\n".join(packs.export_line(*pair) for pair in pairs))
    assert import_jsonl(pack / "problems.jsonl", DirectoryObjects(folder / "elsewhere")) == pairs
    with pytest.raises(packs.PackError, match="missing; a problem of the pack needs it"):
        packs.upload_trees(problems, folder / "empty", DirectoryObjects(folder / "third"))


class Riddle(Problem, frozen=True, kw_only=True):
    """A kind of another package."""

    kind: Literal["riddle"] = "riddle"
    question: str
    picture: Ref


class RiddleHidden(Hidden, frozen=True, kw_only=True):
    kind: Literal["riddle"] = "riddle"
    answer: str


class Nameless(Hidden, frozen=True, kw_only=True):
    answer: str = ""


class RiddleEnvironment:
    problem, hidden = Riddle, RiddleHidden


def test_a_kind_of_another_package_is_read_by_the_structs_that_its_environment_names(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.PLUGINS.own, "riddle", f"{__name__}:RiddleEnvironment")
    line = {"id": "r", "kind": "riddle", "question": "?", "picture": "tree", "hidden": {"answer": "a"}}
    objects = DirectoryObjects(folder / "objects")
    ((problem, hidden),) = import_jsonl(written(folder, line), objects)
    assert (problem.question, hidden) == ("?", RiddleHidden(id="r", answer="a"))
    assert "add.py" in trees.decode(objects.get(problem.picture))
    assert packs.read_problems(packs.write([problem])) == [problem]
    assert packs.read_hidden(packs.write([hidden])) == [hidden]
    with pytest.raises(ProblemError, match=r"field 'hidden.answr': not known; did you mean 'hidden.answer'"):
        import_jsonl(written(folder, line | {"hidden": {"answr": "a"}}), objects)
    with pytest.raises(TypeError, match="Nameless: field 'kind' is unset"):
        packs.write([Nameless(id="r")])


TEXTS = st.text(max_size=20)
CASES = st.lists(st.builds(Case, args=st.just("[1]"), expected=st.just("2")), min_size=1, max_size=2)


@given(
    st.builds(FunctionProblem, id=TEXTS, category=TEXTS, prompt=TEXTS, cell=TEXTS, origin=TEXTS, licence=TEXTS, entry=TEXTS,
              files=st.dictionaries(TEXTS, TEXTS, max_size=2), visible=CASES, actual=st.lists(TEXTS, max_size=2),
              limits=st.builds(Limits, time_s=st.floats(0, 9), memory_mb=st.integers(1, 999)), image=TEXTS, base_commit=TEXTS),
    CASES, st.dictionaries(TEXTS, TEXTS, max_size=2), TEXTS, st.booleans(),
)  # fmt: skip
def test_a_version_1_line_gives_the_same_structs_as_ever(
    problem: FunctionProblem, cases: list[Case], solution: dict[str, str], bug: str, named: bool
) -> None:
    hidden = FunctionHidden(id=problem.id, cases=cases, solution=solution, bug=bug)
    raw = json.loads(packs.export_line(problem, hidden)) | {"version": 1}
    if not named:
        del raw["kind"]
    assert parse_line(json.dumps(raw), 1) == (problem, hidden)


NAMES = st.sampled_from([*RepositoryProblem.__struct_fields__, *RepositoryHidden.__struct_fields__, "hidden", "x"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=6),
)


@given(VALUES)
def test_no_line_of_a_repository_raises_anything_but_a_named_refusal(raw: Any) -> None:
    line = json.dumps({"id": "a", "prompt": "p", **(raw if isinstance(raw, dict) else {}), "kind": "repository"})
    with pytest.raises(ProblemError, match="line 7: "):
        parse_line(line, 7)


def test_trees_of_a_file_go_below_the_state_folder_that_the_environment_names(tmp_path: Path) -> None:
    script = "from shared.problems.importing import STORE; print(STORE)"
    for state, place in ((str(tmp_path), tmp_path / "cache" / "objects"), ("", Path(".etude/cache/objects"))):
        environment = {**os.environ, "ETUDE_STATE": state}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert Path(done.stdout.strip()) == place
