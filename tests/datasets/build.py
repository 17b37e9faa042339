"""Builds rows of the SWE-bench family and Harbor tasks from registry packages:

    python -m tests.datasets.build OUT [--sdists FOLDER]

OUT/repos has a git repository for each package, OUT/*.jsonl the rows, OUT/harbor the tasks; `etude tasks import` reads them.
Real fixes lie between two releases; other bugs are put in. Nothing of the packages is part of this project.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from shared.environments.repository.trees import File, Tree
from tests.datasets import harbor, packages
from tests.datasets.bugs import bugs
from tests.datasets.grading import passing

TRIES = 12  # bugs of one module that are tried
MAX_FAILING = 30  # tests that one bug may fail: more say where it is
MAX_PASSING = 150  # names of other tests in a row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--sdists", type=Path, default=Path(".cache/sdists"))
    options = parser.parse_args()
    packages.fetch(options.sdists)
    builder = Builder(options.out, options.sdists)
    releases = [row for release in packages.RELEASES if (row := builder.of_release(*release))]
    _write(options.out / "swe-bench.jsonl", [_texts(row) for row in releases[::2]])
    _write(options.out / "swe-gym.jsonl", releases[1::2])
    _write(
        options.out / "swe-smith.jsonl",
        [row for name, version in packages.SINGLE for row in builder.bugs_in(name, version)],
    )
    _write(options.out / "r2e-gym.jsonl", [row for release in packages.RELEASES if (row := builder.r2e(*release))])
    harbor.build(options.out / "harbor", packages.tree_of(options.sdists, "inflection", "0.5.1"))


class Builder:
    def __init__(self, out: Path, sdists: Path) -> None:
        self.out, self.sdists, self.cache = out, sdists, out / "cache"

    def of_release(self, name: str, before: str, after: str) -> dict[str, Any] | None:
        """A row of SWE-bench: the older release, and what the newer one changed. None: no test shows a difference."""
        old, new = (packages.tree_of(self.sdists, name, version) for version in (before, after))
        tested = {path: entry for path, entry in old.items() if not packages.is_test(path)}
        tested |= {path: entry for path, entry in new.items() if packages.is_test(path)}
        files = packages.test_files(new)
        fixed = passing(new, files, self.cache)
        broken = passing(tested, files, self.cache)
        failing, others = sorted(fixed - broken), sorted(fixed & broken)
        print(f"{name} {before} -> {after}: {len(failing)} tests show the fix, {len(others)} pass anyway", flush=True)
        if not failing:
            return None
        repository = Repository(self.out / "repos" / f"registry__{name}")
        base, tests, fix = (repository.commit(tree) for tree in (old, tested, new))
        source = [path for path in {*old, *new} if not packages.is_test(path) and path.endswith(".py")]
        return {
            "instance_id": f"registry__{name}-{after}",
            "repo": f"registry/{name}",
            "base_commit": base,
            "problem_statement": f"Tests of {name} {after} fail with {before}: " + ", ".join(failing[:5]),
            "patch": repository.diff(tests, fix, source),
            "test_patch": repository.diff(base, tests, []),
            "FAIL_TO_PASS": failing,
            "PASS_TO_PASS": [one for one in others if one.count("[") == one.count("]")][:MAX_PASSING],
            "version": before,
        }

    def bugs_in(self, name: str, version: str, count: int = 3) -> Iterator[dict[str, Any]]:
        """Rows of SWE-smith: bugs that a few tests find, in different modules or functions."""
        good = packages.tree_of(self.sdists, name, version)
        files = packages.test_files(good)
        whole = passing(good, files, self.cache)
        repository = Repository(self.out / "repos" / f"registry__{name}")
        base = repository.commit(good)
        made = 0
        for path, text in _modules(good):
            for tried, (what, changed) in enumerate(bugs(text)):
                if tried >= TRIES or made >= count:
                    break
                bad = {**good, path: File(changed.encode())}
                failing = whole - passing(bad, files, self.cache)
                if not 0 < len(failing) <= MAX_FAILING:
                    continue
                made += 1
                print(f"{name}: {path}: {what}: {len(failing)} tests find it", flush=True)
                yield {
                    "instance_id": f"registry__{name}.{base[:8]}.compare__{made}",
                    "repo": f"swesmith/registry__{name}.{base[:8]}",
                    "patch": repository.diff(base, repository.commit(bad), []),
                    "problem_statement": f"{PurePosixPath(path).name} of {name} gives wrong results since the last change.",
                    "FAIL_TO_PASS": sorted(failing),
                    "PASS_TO_PASS": sorted(whole - failing)[:MAX_PASSING],
                    "image_name": "none",
                }

    def r2e(self, name: str, before: str, after: str) -> dict[str, Any] | None:
        """A row of R2E-Gym. None: the tests do not run as files of their own."""
        old, new = (packages.tree_of(self.sdists, name, version) for version in (before, after))
        tests = {f"test_{number}.py": new[path] for number, path in enumerate(packages.test_files(new), 1)}
        places = {f"r2e_tests/{file}": entry for file, entry in tests.items()}
        fixed, broken = (passing({**tree, **places}, sorted(places), self.cache) for tree in (new, old))
        print(
            f"{name} as R2E-Gym: {len(fixed - broken)} tests show the fix, {len(fixed & broken)} pass anyway",
            flush=True,
        )
        if not fixed - broken:
            return None
        repository = Repository(self.out / "repos" / name)
        base, fix = repository.commit(old), repository.commit(new)
        source = sorted(path for path in {*old, *new} if path.endswith(".py") and not packages.is_test(path))
        shown = [path for path in source if old.get(path) != new.get(path)]
        return {
            "repo_name": name,
            "commit_hash": fix,
            "problem_statement": f"Tests of {name} {after} fail with {before}.",
            "parsed_commit_content": json.dumps(
                {
                    "old_commit_hash": base,
                    "new_commit_hash": fix,
                    "file_diffs": [_file_diff(path, new) for path in shown],
                }
            ),
            "execution_result_content": json.dumps(
                {
                    "test_file_names": sorted(tests),
                    "test_file_codes": [_text(tests[file]) for file in sorted(tests)],
                    "old_commit_res_stdout": _summary(broken, fixed),
                    "new_commit_res_stdout": _summary(fixed, fixed),
                }
            ),
            "expected_output_json": json.dumps(
                {name.partition("::")[2].replace("::", "."): "PASSED" for name in fixed}
            ),
        }


class Repository:
    """A git repository whose commits are whole trees."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._git("init", "--quiet", "--bare")

    def commit(self, tree: Tree) -> str:
        """Add a commit with this tree, and return its name. The same tree behind the same commits has the same name."""
        lines = []
        for path, entry in sorted(tree.items()):
            if isinstance(entry, File):
                blob = self._git("hash-object", "-w", "--stdin", given=entry.data)
                lines.append(f"{'100755' if entry.executable else '100644'} {blob}\t{path}")
        self._git("read-tree", "--empty")
        self._git("update-index", "--index-info", given="".join(f"{line}\n" for line in lines).encode())
        made = self._git("commit-tree", self._git("write-tree"), "-m", "state")
        self._git("update-ref", f"refs/heads/{made[:12]}", made)
        return made

    def diff(self, before: str, after: str, paths: list[str]) -> str:
        return self._git("diff", "--no-renames", before, after, "--", *paths, strip=False)

    def _git(self, *arguments: str, given: bytes = b"", strip: bool = True) -> str:
        facts = {"NAME": "build", "EMAIL": "build@example.org", "DATE": "2020-01-01T00:00:00Z"}
        who = {f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER") for what, value in facts.items()}
        command = ["git", "--git-dir", str(self.folder), *arguments]
        if arguments[0] == "init":
            command = ["git", *arguments, str(self.folder)]
        done = subprocess.run(
            command, input=given, capture_output=True, check=True, env={"PATH": "/usr/bin:/bin", **who}
        )
        text = done.stdout.decode()
        return text.strip() if strip else text


def _modules(tree: Tree) -> Iterator[tuple[str, str]]:
    """The package's own modules, the largest first."""
    found = [
        (path, entry)
        for path, entry in tree.items()
        if isinstance(entry, File) and path.endswith(".py") and not packages.is_test(path) and "setup.py" not in path
    ]
    for path, entry in sorted(found, key=lambda one: -len(one[1].data))[:4]:
        yield path, entry.data.decode()


def _file_diff(path: str, new: Tree) -> dict[str, Any]:
    entry = new.get(path)
    return {
        "header": {"file": {"path": path}, "misc_line": None if path in new else "deleted file mode 100644"},
        "is_binary_file": False,
        "new_file_content": _text(entry) if isinstance(entry, File) else "",
    }


def _text(entry: object) -> str:
    return entry.data.decode() if isinstance(entry, File) else ""


def _summary(passed: set[str], every: set[str]) -> str:
    return "\n".join(f"{'PASSED' if name in passed else 'FAILED'} {name}" for name in sorted(every))


def _texts(row: dict[str, Any]) -> dict[str, Any]:
    """SWE-bench has its lists of tests as texts."""
    return row | {field: json.dumps(row[field]) for field in ("FAIL_TO_PASS", "PASS_TO_PASS")}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{path}: {len(rows)} rows", flush=True)


if __name__ == "__main__":
    main()
