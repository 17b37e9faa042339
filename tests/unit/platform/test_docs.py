"""What the documentation says can be typed and followed: links, commands, options, make targets, modules, tests."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
_INLINE = re.compile(r"`([^`\n]+)`")


def typed(page: Path) -> Iterator[str]:
    """Lines of code blocks, and what stands between single backticks, comments cut off."""
    text = page.read_text()
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            yield re.split(r" # |\s{2,}", line.strip())[0]  # what follows explains
        else:
            yield from _INLINE.findall(line)


def commands(word: str) -> list[tuple[str, list[str]]]:
    """(page, words after `word`) of everything that is typed and begins with it, behind `&&` or in a container too."""
    found = []
    for page in PAGES:
        for line in typed(page):
            for part in re.split(r"&&|;|\|(?= )", line):
                part = re.sub(r"^docker compose (?:exec|run --rm)(?: -T)? \w+ (?=etude )", "", part.strip())
                part = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", part)
                if part.startswith(f"{word} ") and "…" not in part:
                    try:
                        found.append((page.name, shlex.split(part)[1:]))
                    except ValueError:
                        continue  # a sentence with an apostrophe
    return found


def root() -> Any:
    from etude import cli

    if not cli.app.registered_commands:
        cli._front_door()
    return get_command(cli.app)


@pytest.mark.parametrize(("page", "words"), commands("etude"), ids=lambda value: str(value)[:60])
def test_a_command_exists_with_its_options(page: str, words: list[str]) -> None:
    command, name = root(), "etude"
    while words and hasattr(command, "get_command") and not words[0].startswith("-"):
        if words[0].isupper():
            return  # `etude COMMAND --help`
        name, *words = words
        for one in re.split(r"[|/]", name):
            found = command.get_command(None, one)
            assert found is not None, f"{page}: no command {one!r}"
            if hasattr(found, "loaded"):
                found = found.loaded()
        command = found
    options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    for word in words:
        if word.startswith("--"):
            assert word.split("=")[0].rstrip("].") in options, f"{page}: {name} has no {word}"


@pytest.mark.parametrize(("page", "words"), commands("make"), ids=lambda value: str(value)[:60])
def test_a_make_target_exists(page: str, words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert words[0] in targets, page


@pytest.mark.parametrize(("page", "words"), commands("python"), ids=lambda value: str(value)[:60])
def test_a_module_that_is_run_exists(page: str, words: list[str]) -> None:
    if (
        words[0] == "-m"
        and not words[1].split(".")[-1].isupper()
        and words[1].split(".")[0] in {"benchmarks", "infra", "services", "tests", "etude"}
    ):
        assert importlib.util.find_spec(words[1]) is not None, f"{page}: no module {words[1]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not target.startswith(("http", "#")):
            assert (page.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_test_that_is_named_is_there(page: Path) -> None:
    named = set(re.findall(r"`(test_\w+)`", page.read_text()))
    if named:
        known = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
        assert not {name for name in named if f"def {name}(" not in known}


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    # Not of the tests' own environment: whatever is installed there is mined for problems.
    mkdocs = ROOT / ".cache" / "docs" / "bin" / "mkdocs"
    if not mkdocs.exists():
        pytest.skip("`make docs` installs MkDocs")
    command = [str(mkdocs), "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Étude" in (tmp_path / "index.html").read_text()
