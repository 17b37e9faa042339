"""Harbor tasks on a package's tree: a bug to repair, a function to add, and a task of two steps."""

from __future__ import annotations

from pathlib import Path

from shared.environments.repository import trees
from shared.environments.repository.trees import Tree

TASK = """\
schema_version = "1.1"
{steps}
[metadata]
category = "{category}"

[agent]
timeout_sec = 600.0

[verifier]
timeout_sec = 120.0

[environment]
cpus = 1
memory_mb = 1024
"""
DOCKERFILE = """\
FROM python:3.12-slim
RUN apt-get update && apt-get install -y tmux asciinema && rm -rf /var/lib/apt/lists/*
WORKDIR /app
COPY repo/ /app/
"""
TEST = """\
#!/bin/bash
apt-get update
apt-get install -y curl
curl -LsSf https://example.org/uv/install.sh | sh
source $HOME/.local/bin/env
if [ "$PWD" = "/" ]; then
    echo "Error: No working directory set."
    exit 1
fi
uvx --with pytest==8.4.1 --with pytest-json-ctrf==0.3.5 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA
if [ $? -eq 0 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
SHELL = """\
#!/bin/bash
set -u
reward=0
[ -f /app/first.txt ] && [ "$(cat /app/second.txt)" = "$EXPECTED" ] && reward=1
echo $reward > /logs/verifier/reward.txt
"""
EDIT = """\
#!/bin/bash
set -e
python3 - <<'PYTHON'
from pathlib import Path

path = Path("/app/inflection/__init__.py")
text = path.read_text()
{edit}
path.write_text(text)
PYTHON
"""


def build(folder: Path, tree: Tree) -> None:
    """Write three tasks below the folder."""
    _task(
        folder / "ordinals",
        tree,
        "debugging",
        "`ordinal` gives the wrong ending for 11, 12 and 13 in /app. Repair it.\n",
        "from inflection import ordinal\n\n\ndef test_teens():\n"
        '    assert [ordinal(n) for n in (11, 12, 13, 111)] == ["th"] * 4\n\n\n'
        'def test_others():\n    assert [ordinal(n) for n in (1, 2, 3, 4, 21)] == ["st", "nd", "rd", "th", "st"]\n',
        EDIT.format(edit='text = text.replace("number % 100 in (110, 120, 130)", "number % 100 in (11, 12, 13)")'),
        ("number % 100 in (11, 12, 13)", "number % 100 in (110, 120, 130)"),
    )
    _task(
        folder / "kebab",
        tree,
        "feature",
        "Add a function `kebab(word)` to the package in /app: `dasherize` of `underscore`.\n",
        "import inflection\n\n\nclass TestKebab:\n    def test_words(self):\n"
        '        assert inflection.kebab("ActiveModel") == "active-model"\n\n'
        '    def test_one(self):\n        assert inflection.kebab("word") == "word"\n',
        EDIT.format(edit='text += "\\n\\ndef kebab(word: str) -> str:\\n    return dasherize(underscore(word))\\n"'),
        None,
    )
    _steps(folder / "two-steps", tree)


def _task(
    folder: Path, tree: Tree, category: str, instruction: str, tests: str, solve: str, change: tuple[str, str] | None
) -> None:
    _environment(folder, tree, change)
    _write(folder / "task.toml", TASK.format(steps="", category=category))
    _step(folder, instruction, tests, solve)


def _steps(folder: Path, tree: Tree) -> None:
    _environment(folder, tree, None)
    steps = '[[steps]]\nname = "first"\n\n[[steps]]\nname = "second"\nverifier = {env = {EXPECTED = "Octopi"}}\n'
    _write(folder / "task.toml", TASK.format(steps="", category="feature") + f"\n{steps}")
    write = "#!/bin/bash\nset -e\nprintf '{}' > /app/{}\n"
    _step(
        folder / "steps/first",
        "Write the plural of `octopus`, as the package says it, to /app/first.txt.\n",
        'from pathlib import Path\n\nimport inflection\n\n\ndef test_first():\n    assert Path("/app/first.txt").read_text() == '
        'inflection.pluralize("octopus")\n',
        write.format("octopi", "first.txt"),
    )
    _step(
        folder / "steps/second",
        "Write the text of /app/first.txt, titleized, to /app/second.txt.\n",
        "",
        write.format("Octopi", "second.txt"),
    )


def _step(folder: Path, instruction: str, tests: str, solve: str) -> None:
    """`tests`: for pytest; empty: a verifier in shell decides."""
    _write(folder / "instruction.md", instruction)
    _write(folder / "tests/test.sh", TEST if tests else SHELL)
    if tests:
        _write(folder / "tests/test_outputs.py", tests)
    _write(folder / "solution/solve.sh", solve)


def _environment(folder: Path, tree: Tree, change: tuple[str, str] | None) -> None:
    """The package, with one text replaced."""
    trees.write(tree, folder / "environment/repo")
    _write(folder / "environment/Dockerfile", DOCKERFILE)
    if change:
        path = next((folder / "environment/repo").glob("**/inflection/__init__.py"), None) or next(
            (folder / "environment/repo").glob("**/inflection.py")
        )
        text = path.read_text()
        assert change[0] in text, "the package has changed"
        path.write_text(text.replace(*change))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
