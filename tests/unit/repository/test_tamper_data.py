"""Submissions and trees as data: what reaches outside, is too large or holds the future is refused or left out."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from shared.contracts.trajectory import Change
from shared.environments.repository import submission, trees
from shared.environments.repository.graders import runner
from shared.environments.repository.infrastructure_files import split
from shared.environments.repository.problem import RepositoryHidden


def naive(changes: dict[str, Change], folder: Path) -> None:
    """Write every change where it says."""
    for path, change in changes.items():
        target = Path(os.path.join(folder, path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(submission.content(change))


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (["../outside/x"], "'../outside/x'"),
        (["a/../../outside/x"], "'a/../../outside/x'"),
        (["link/x"], "found the link 'link' on the way"),
        (["a.py", "A.py"], "differs from"),
        (["pkg/a.py", "PKG/b.py"], "only in case"),
        (["calc.PY"], "differs from 'calc.py' only in case"),
        (["caf\u00e9.py", "cafe\u0301.py"], "only in case"),
        (["made/" + "d/" * 1200 + "x"], "'made/d"),
    ],
)
def test_a_submission_that_leaves_its_folder_or_shadows_a_file_is_refused(
    tmp_path: Path, paths: list[str], said: str
) -> None:
    changes = {path: Change(text="changed") for path in paths}
    for name in ("naive", "true"):
        tree = tmp_path / name / "tree"
        (tmp_path / name / "outside").mkdir(parents=True)
        tree.mkdir()
        (tree / "calc.py").write_text("")
        (tree / "link").symlink_to("../outside")
    if len(paths[0]) < 1000:  # the naive way writes them all
        naive(changes, tmp_path / "naive" / "tree")
    with pytest.raises(submission.SubmissionError, match=said.replace("(", "\\(")):
        submission.apply(changes, tmp_path / "true" / "tree")
    assert list((tmp_path / "true" / "outside").iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "true" / "tree").iterdir()) == ["calc.py", "link"]


def test_a_file_may_change_its_case_by_a_deletion(tmp_path: Path) -> None:
    (tmp_path / "calc.py").write_text("")
    submission.apply({"calc.py": Change(), "Calc.py": Change(text="new")}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["Calc.py"]


def test_too_many_or_too_large_files_are_refused_before_the_first_is_written(tmp_path: Path) -> None:
    many = {f"f{number}": Change(text="") for number in range(submission.MAX_CHANGES + 1)}
    large = {"x": Change(data=bytes(submission.MAX_BYTES + 1))}
    for changes in (many, large):
        with pytest.raises(submission.SubmissionError, match="allowed: at most"):
            submission.apply(changes, tmp_path)
    assert list(tmp_path.iterdir()) == []


def _tar(add: Callable[[tarfile.TarFile], None]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        add(archive)
    return zstandard.compress(buffer.getvalue())


def _entry(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> Callable[[tarfile.TarFile], None]:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return lambda archive: archive.addfile(entry)


@pytest.mark.parametrize(
    "bad",
    [
        _entry("../x"),
        _entry("/x"),
        _entry("x", tarfile.SYMTYPE, "/etc/passwd"),
        _entry("x", tarfile.SYMTYPE, "../../x"),
        _entry("x", tarfile.LNKTYPE, "/etc/passwd"),
        _entry("x", tarfile.CHRTYPE),
        _entry("x", tarfile.FIFOTYPE),
    ],
)
def test_a_tree_with_a_way_out_or_a_device_is_refused(bad: Callable[[tarfile.TarFile], None]) -> None:
    with pytest.raises(trees.TreeError):
        trees.decode(_tar(bad))


def test_a_tar_bomb_is_refused_without_being_unpacked() -> None:
    bomb = zstandard.compress(bytes(trees.MAX_BYTES * 2))
    assert len(bomb) < 1 << 20
    assert len(zlib.compress(bytes(1 << 20))) < 1 << 11  # a naive unpacker takes what such data ask for
    with pytest.raises(trees.TreeError):
        trees.decode(bomb)


def test_the_future_is_not_in_a_tree_that_is_made_from_a_repository(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        argv = ["git", *identity, *arguments]
        return subprocess.run(argv, cwd=repository, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    for text in ("broken", "repaired"):
        (repository / "calc.py").write_text(text)
        git("add", ".")
        git("commit", "-q", "-m", text)
    git("checkout", "-q", "HEAD~1")
    git("gc", "-q")
    assert "repaired" in git("log", "--all", "--format=%s")  # a naive copy of the folder shows it
    trees.unpack_tree(trees.pack_tree(repository), tmp_path / "tree")
    found = {path.relative_to(tmp_path / "tree").as_posix() for path in (tmp_path / "tree").rglob("*")}
    assert found == {"calc.py"}
    assert (tmp_path / "tree" / "calc.py").read_text() == "broken"


@pytest.mark.parametrize(
    ("name", "tests", "guarded", "free"),
    [
        (
            "pytest",
            "tests/test_a.py",
            ["sub/conftest.py", "Conftest.py", "x.pth", "a.egg-info/entry_points.txt", "tests/new.py", "tox.ini"],
            ["package.json", "go.mod", "calc.py", "src/tests_util.py"],
        ),
        ("node", "test/a.test.mjs", ["package.json", "node_modules/x/index.js", ".npmrc"], ["calc.mjs", "go.mod"]),
        ("go", "calc_test.go", ["evil_test.go", "sub/evil_test.go", "go.mod", "go.work", "vendor/x/x.go"], ["calc.go"]),
        ("cargo", "tests/a.rs", ["build.rs", ".cargo/config.toml", "Cargo.toml", "rust-toolchain"], ["src/lib.rs"]),
    ],
)
def test_each_runner_keeps_the_files_that_decide_how_it_runs(
    name: str, tests: str, guarded: list[str], free: list[str]
) -> None:
    hidden = RepositoryHidden(id="x", fail_to_pass=[], runner=name, tests={tests: Change(text="")})  # type: ignore[arg-type]
    changes = {path: Change(text="") for path in (tests, *guarded, *free)}
    applied, ignored = split(changes, hidden, runner(name))
    assert sorted(applied) == sorted(free)
    assert ignored == tuple(sorted((tests, *guarded)))


def test_a_build_file_that_the_solution_changes_may_be_changed() -> None:
    solution = {"go.mod": Change(text="module x\n")}
    hidden = RepositoryHidden(id="x", fail_to_pass=[], runner="go", solution=solution)
    applied, ignored = split({"go.mod": Change(text=""), "sub/go.mod": Change(text="")}, hidden, runner("go"))
    assert (list(applied), ignored) == (["go.mod"], ("sub/go.mod",))


def test_stored_outputs_that_tests_compare_with_stay_as_they_are_unless_the_solution_changes_them() -> None:
    secret = RepositoryHidden(
        id="a",
        runner="node",
        fail_to_pass=["src/a.test.js::adds"],
        tests={"src/a.test.js": Change(text="x")},
        solution={"testdata/new.json": Change(text="x"), "src/parts/snapshots/take.js": Change(text="x")},
    )
    kept = ["pkg/testdata/add.golden", "src/__snapshots__/a.js.snap", "lib/one.GOLDEN", "src/fixtures/a.json"]
    kept += ["fixtures/b.json", "testdata/old.json"]
    free = ["src/a.js", "testdata/new.json", "src/parts/snapshots/other.js", "lib/fixtures/code.js", "lib/golden.js"]
    applied, ignored = split({path: Change(text="y") for path in (*kept, *free)}, secret, runner("node"))
    assert set(ignored) == set(kept)
    assert set(applied) == set(free)
