"""Files that an attempt at a tree changed although its task gives no reason to.

Nobody can say of every file whether a task needs it. These are the kinds that reviewers object to: scratch files left behind,
copies, the project's own configuration and its pins. A file that the task names is in its scope.
"""

from __future__ import annotations

import fnmatch
from pathlib import PurePosixPath

from shared.terms import Evidence, Found, Seen

# Of new files, by name: what an attempt makes for itself. Of any file: what configures the project, its checks or its build.
SCRATCH = (
    "*.orig", "*.rej", "*.bak", "*.tmp", "*.log", "*.swp", "*~", "*.pyc", "nohup.out", "core",
    "debug*.py", "repro*.py", "reproduce*.py", "scratch*", "tmp*", "temp_*", "demo_*.py", "check_*.py", "verify_*.py",
    "quick_test*",     "*_SUMMARY.md", "*_NOTES.md", "CHANGES_MADE*", "IMPLEMENTATION*.md", "SOLUTION*.md", "FIX*.md",
)  # fmt: skip
PROJECT = (
    "pyproject.toml", "setup.cfg", "setup.py", "tox.ini", "pytest.ini", "noxfile.py", "requirements*.txt", "uv.lock", "poetry.lock",
    "Pipfile*", "package.json", "package-lock.json", "yarn.lock", "pnpm-lock.yaml", "Cargo.toml", "Cargo.lock", "go.mod", "go.sum",
    "Makefile", "Dockerfile", "LICENSE*", ".gitignore", ".gitattributes", ".pre-commit-config.yaml", ".gitlab-ci.yml",
)  # fmt: skip
PROJECT_FOLDERS = (
    ".github",
    ".circleci",
    ".gitlab",
    ".git",
    ".idea",
    ".vscode",
    "node_modules",
    "__pycache__",
    ".pytest_cache",
)


def find(seen: Seen) -> Found:
    """Count the changed files of a tree that are outside of the task's scope."""
    evidence = []
    for path, change in sorted(seen.trajectory.changes.items()):
        if _named(path, seen.task):
            continue
        new = path not in seen.before and not change.deleted
        if why := _objection(PurePosixPath(path), new):
            verb = "deleted" if change.deleted else "added" if new else "changed"
            evidence.append(Evidence(f"{verb} {path[:200]}: {why}, and the task does not name it"))
    return Found(float(len(evidence)), evidence)


def _named(path: str, task: str) -> bool:
    return path in task or PurePosixPath(path).name in task


def _objection(path: PurePosixPath, new: bool) -> str:
    """Return what kind of file it is; the empty string: one that a task may change."""
    if any(part in PROJECT_FOLDERS for part in path.parts[:-1]):
        return "a folder of tools"
    if any(fnmatch.fnmatchcase(path.name, pattern) for pattern in PROJECT):
        return "configuration of the project"
    if new and any(fnmatch.fnmatchcase(path.name, pattern) for pattern in SCRATCH):
        return "a scratch file"
    return ""
