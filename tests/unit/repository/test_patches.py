"""Unified diffs: what git writes is applied exactly; anything else is refused by its path."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.trajectory import Change
from shared.environments.repository import patches, trees
from shared.environments.repository.patches import PatchError
from shared.environments.repository.trees import File, Link

LINES = st.lists(
    st.sampled_from(["a\n", "b\n", "\n", "ä\r\n", "--- x\n", "+++ y\n", "@@ -1 +1 @@\n", "\\ z\n", "diff --git\n"]),
    max_size=12,
)
TEXTS = st.builds(lambda lines, end: ("".join(lines) + end).encode(), LINES, st.sampled_from(["", "no newline"]))
FILES = st.builds(File, TEXTS, st.booleans())
TREES = st.dictionaries(st.sampled_from(["a.py", "ü b.py", "d/c.py", "d/e"]), FILES, max_size=4)


def diff(before: dict[str, File], after: dict[str, File], *options: str) -> str:
    """What git writes of two trees."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def git(*arguments: str, tree: str = "a") -> str:
            command = [
                "git",
                f"--git-dir={folder / 'git'}",
                f"--work-tree={folder / tree}",
                "-c",
                "core.autocrlf=false",
            ]
            return subprocess.run([*command, *arguments], check=True, capture_output=True).stdout.decode()

        made = []
        for side, tree in (("a", before), ("b", after)):
            trees.write(tree, folder / side)
            if side == "a":
                git("init", "--quiet")
            git("add", "--all", tree=side)
            made.append(git("write-tree").strip())
        return git("diff", *options, *made)


@settings(max_examples=25)
@given(TREES, TREES, st.sampled_from(["--no-renames", "-M", "-C", "-B -M"]))
def test_what_git_writes_is_applied_as_git_means_it(
    before: dict[str, File], after: dict[str, File], option: str
) -> None:
    if not (patch := diff(before, after, *option.split())):
        return
    assert patches.applied(before, patch) == after
    changed = patches.changes_of(before, patch)
    assert patches.with_changes(before, changed) == after
    assert all(before.get(path) != after.get(path) for path in changed)


PIECES = [
    "a",
    "b/",
    " ",
    "-",
    "+",
    "@@",
    ",1",
    "\n",
    "\\",
    '"',
    "diff --git a/x b/x\n",
    "--- a/x\n+++ b/x\n",
    "@@ -1 +1 @@\n",
    "\ud800",
    "9" * 5000,
]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
def test_no_text_raises_anything_but_a_named_refusal(text: str) -> None:
    try:
        patches.applied({"x": File(b"a\n")}, text)
    except PatchError as error:
        assert str(error)  # noqa: PT017 (a text that is a patch raises nothing)


HEAD = "diff --git a/x b/x\n"
MODIFY = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ("", "found no file in it"),
        ("@@ -1 +1 @@\n-a\n+b\n", "line 1: found a hunk without a file"),
        ("--- a/x\n+++ b/x\n@@ -1,2 +1 @@\n-a\n+b\n", "line 3: the hunk says 2 old and 1 new lines; found 1 and 1"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-c\n+b\n", "'x': the lines of the hunk at line 1 do not stand there"),
        ("--- a/y\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n", "'y': is not a file of the tree"),
        ("--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+b\n", "'x': is in the tree; the patch makes it"),
        ("--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", "the patch deletes it, but lines are left"),
        ("--- a/../x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", "line 1: '../x': has a part"),
        (HEAD + "new file mode 120000\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+b\n", "line 2: found mode 120000"),
        ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+\ud800\n", "line 5: found half a character"),
        (f"--- a/x\n+++ b/x\n@@ -{'1' * 5000} +1 @@\n-a\n+b\n", "line 3: found a number of more than 9 digits"),
        (HEAD + "GIT binary patch\nliteral 1\n", "line 2: found a binary patch; allowed: patches of text"),
    ],
)
def test_a_patch_that_the_tree_cannot_take_is_refused(patch: str, words: str) -> None:
    with pytest.raises(PatchError, match=words.replace("(", r"\(")):
        patches.applied({"x": File(b"a\nz\n")}, patch)


@pytest.mark.parametrize("option", ["--no-renames", "-B -M", "-B -C"])
def test_two_files_that_change_places_are_both_kept(option: str) -> None:
    long = {name: File("".join(f"{name} {number}\n" for number in range(200)).encode()) for name in "abc"}
    turned = {"a": long["c"], "b": long["a"], "c": long["b"]}
    patch = diff(long, turned, *option.split())
    assert ("rename from" in patch) == (option != "--no-renames")
    assert patches.applied(long, patch) == turned


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        (MODIFY + "diff --git a/x b/z\nrename from x\nrename to z\n", "'x': the patch changes it twice"),
        (MODIFY + "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-b\n+c\n", "'x': the patch changes it twice; allowed: one diff"),
        ("diff --git a/x b/y\nrename from x\nrename to y\n", "'y': is in the tree; the patch makes it"),
        ("diff --git a/x b/y\ncopy from x\ncopy to y\n", "'y': is in the tree; the patch makes it"),
    ],
)
def test_a_patch_that_would_lose_a_file_is_refused(patch: str, words: str) -> None:
    with pytest.raises(PatchError, match=words):
        patches.applied({"x": File(b"a\n"), "y": File(b"y\n")}, patch)


def test_lines_that_have_moved_are_found_in_the_only_other_place() -> None:
    patch = "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n"
    assert patches.applied({"x": File(b"0\na\n")}, patch) == {"x": File(b"0\nb\n")}
    with pytest.raises(PatchError, match="in no other place or in several"):
        patches.applied({"x": File(b"0\na\na\n")}, patch)


def test_a_changed_link_is_no_change_of_a_file() -> None:
    with pytest.raises(PatchError, match="'x': is a link"):
        patches.changes({"x": Link("a")}, {"x": Link("b")})
    assert patches.changes({"x": Link("a"), "y": File(b"\xff")}, {"y": File(b"\xfe", True)}) == {
        "x": Change(),
        "y": Change(data=b"\xfe", executable=True),
    }
