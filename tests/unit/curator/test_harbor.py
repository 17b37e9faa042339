"""Harbor tasks: a Dockerfile and a verifier are read strictly, or refused by their line."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from services.curator import own, sources
from services.curator.sources import Refused, docker, verifier
from services.curator.sources.clones import Clones
from shared.environments.repository.trees import File
from shared.objects.directory import DirectoryObjects
from shared.problems import ProblemError


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "FROM ghcr.io/some/image",
            "line 1: FROM ghcr.io/some/image: allowed: one stage, from python, ubuntu or debian",
        ),
        ("FROM python:3.12\nRUN pip install numpy", "line 2: RUN pip install numpy: changes the image"),
        ("FROM python:3.12\nRUN apt-get update && \\\n  make all", "line 2: RUN apt-get update && make all"),
        ("FROM python:3.12\nRUN \\ \n# a comment\n\n make all \\", "line 2: RUN make all: changes the image"),
        ("FROM python:3.12\nCOPY --from=other a b", "is not understood; allowed: files of the task's environment/"),
        ("FROM python:3.12\nWORKDIR /app\nCOPY a.py /etc/", "copies out of the working directory /app"),
        ("FROM python:3.12\nWORKDIR /app\nCOPY nothing.py .", "found no 'nothing.py' in environment/"),
        ("FROM python:3.12\nWORKDIR /app\nCOPY --chmod=755 a.py .", "is not understood; allowed: files"),
        ("FROM python:3.12\nWORKDIR /app\nADD x.bin .", "unpacks 'x.bin'; allowed: files and folders"),
        ("FROM python:3.12\nWORKDIR /app\nADD a.tar .", "unpacks 'a.tar'"),
        ("FROM python:3.12\nENV TOKEN PIP_INDEX=1", "sets a variable that the task may need"),
        ('FROM python:3.12\nCMD ["bash","-c","service postgresql start && sleep infinity"]', "starts a program"),
        ("FROM python:3.12\nCMD bash start.sh", "starts a program"),
        ("FROM python:3.12\nCMD ./server & sleep infinity", "starts a program"),
        ("FROM python:3.12\nCMD [bash", "starts a program"),
        ("FROM python:3.12\nENV TOKEN=1", "sets a variable that the task may need"),
        ("FROM python:3.12\nCMD python server.py", "starts a program"),
        ("FROM python:3.12\nFROM debian", "one stage"),
        ("FROM", "line 1: FROM : is not understood; allowed: an instruction with arguments"),
        ("FROM python:3.12\nENV", "line 2: ENV : is not understood"),
    ],
)
def test_a_dockerfile_that_needs_its_image_is_refused_by_its_line(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "Dockerfile").write_text(line + "\n")
    (tmp_path / "a.py").write_text("")
    for name, mode in (("x.bin", "w:gz"), ("a.tar", "w")):
        with tarfile.open(tmp_path / name, mode) as archive:  # type: ignore[call-overload]
            archive.add(tmp_path / "a.py", "a.py")
    with pytest.raises(Refused) as refused:
        docker.built(tmp_path)
    assert words in str(refused.value)
    assert "no image was given (--images)" in str(refused.value)


def test_a_dockerfile_that_only_copies_gives_its_files(tmp_path: Path) -> None:
    (tmp_path / "repo/pkg").mkdir(parents=True)
    (tmp_path / "repo/pkg/a.py").write_text("x")
    (tmp_path / "b.py").write_text("y")
    (tmp_path / "Dockerfile").write_text(
        "# a comment\nFROM python:3.12-slim\nENV PYTHONUNBUFFERED=1\nRUN apt-get update \\\n  && apt-get install -y tmux=3 \\\n"
        '  && rm -rf /var/lib/apt/lists/*\nWORKDIR /app\nCOPY repo/ /app/\nCOPY b.py c/\nCOPY b.py d.py\nCMD ["bash"]\n'
    )
    tree, place = docker.built(tmp_path)
    assert place == "/app"
    assert sorted(tree) == ["c/b.py", "d.py", "pkg/a.py"]
    (tmp_path / ".dockerignore").write_text("repo/pkg\n")
    with pytest.raises(Refused, match="line 8: COPY repo/ /app/: leaves out the files of"):
        docker.built(tmp_path)


@pytest.mark.parametrize(
    "start", ['["/bin/bash"]', '["sleep", "infinity"]', '["sh","-c","tail -f /dev/null"]', "bash", "sleep 3600", "[]"]
)
def test_a_dockerfile_may_start_a_shell_or_a_program_that_waits(tmp_path: Path, start: str) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM debian\nCMD {start}\n")
    assert docker.built(tmp_path) == ({}, "/")


INSTALL = "curl -LsSf https://example.org/uv/install.sh | sh"
PYTEST = "uvx --with pytest==8.4.1 pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA"
FILES = {"test_outputs.py": File(b""), "sub/test_b.py": File(b""), "data.json": File(b"")}


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (
            f"#!/bin/bash\napt-get update\n{PYTEST}\nif [ $? -eq 0 ]; then\n  echo 1 > /logs/verifier/reward.txt\nfi\n",
            ["test_outputs.py"],
        ),
        ("pytest /tests", ["sub/test_b.py", "test_outputs.py"]),
        ('python -m pytest "$TEST_DIR"/sub -q || true', ["sub/test_b.py"]),
        (
            "cd /app || exit 1\nuv run --with a -p 3.13 python -m pytest 2>&1 | tee /logs/out.txt",
            ["sub/test_b.py", "test_outputs.py"],
        ),
        (
            "#!/bin/bash # a; b\nset -euo pipefail\napt-get update && apt-get install -y curl >/dev/null 2>&1\n"
            f"echo 'a; b | c' \"in $PWD; (so)\"\n{INSTALL}\n{PYTEST} || true\nexit_code=$?\n"
            "if [ $exit_code -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi",
            ["test_outputs.py"],
        ),
        ("cd /app\npytest", ["sub/test_b.py", "test_outputs.py"]),
    ],
)
def test_a_verifier_that_calls_pytest_names_its_files(script: str, found: list[str]) -> None:
    assert verifier.test_files(script, FILES) == found


def test_a_verifier_in_shell_is_one_test_of_its_own() -> None:
    assert verifier.only_shell("#!/bin/bash\n# no pytest here\n[ -f /app/a ] && echo 1 > /logs/verifier/reward.txt\n")
    assert not verifier.only_shell("uvx pytest /tests")
    assert not verifier.only_shell("apt-get install -y jq\n")
    compile(verifier.WRAPPER.format(logs="/tmp/x", environment={"A": "'\"{}"}), "wrapper", "exec")


@pytest.mark.parametrize(
    "line",
    [
        "echo hi; python3 /tests/prepare.py",
        "echo hi && python3 /tests/prepare.py",
        "set -e; ./prep.sh",
        "if ./build.sh; then",
        "if [ $(./build.sh) ]; then",
        "cd `./build.sh`",
        "echo ok & ./build.sh",
        "echo ok | ./build.sh",
        "echo 1 > /app/answer.txt",
        "echo '\\'; ./build.sh '\\'",
        "export PATH=$(./build.sh)",
        "curl https://example.org/uv/other | sh",
        "python3 /tests/prepare.py && pytest /tests",
        "VALUE=1 pytest /tests",
        "pytest /tests; ./build.sh",
        "pytest /tests | ./build.sh",
        "pytest /tests > $(./build.sh)",
    ],
)
def test_a_verifier_whose_line_does_more_than_it_seems_is_refused(line: str) -> None:
    script = line if "pytest" in line else f"{line}\n{PYTEST}"
    with pytest.raises(Refused, match="is not understood"):
        verifier.test_files(script, FILES)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("node check.js\n" + PYTEST, "line 1: node check.js: is not understood"),
        (PYTEST + "\necho a\n./build.sh \\\n", "line 3: ./build.sh: is not understood"),
        ("# a comment \\\n./build.sh\n" + PYTEST, "line 2: ./build.sh: is not understood"),
        ("echo \\\n\n./build.sh\n" + PYTEST, "line 3: ./build.sh: is not understood"),
        ("echo \\ \n./build.sh\n" + PYTEST, "line 2: ./build.sh: is not understood"),
        ("echo 1 > /logs/verifier/reward.txt", "found 0 calls of pytest; allowed: one"),
        (PYTEST + "\n" + PYTEST, "found 2 calls of pytest"),
        (
            "uv run --with pytest==8.4.1 python run.py",
            "python run.py: is not understood; allowed: a call of pytest itself",
        ),
        ("pytest -k some /tests", "-k: chooses among the tests; allowed: whole files"),
        ("pytest --ignore=/tests/sub /tests", "--ignore=/tests/sub: chooses among the tests"),
        ("pytest -ksome /tests", "-ksome: chooses among the tests"),
        ("pytest /tests > /logs/../app/add.py", "line 1: pytest /tests > /logs/../app/add.py: is not understood"),
        ("pytest /tests/none.py", "/tests/none.py: found no file of tests there"),
        ("pytest /app/test_a.py", "/app/test_a.py: is no file of /tests"),
    ],
)
def test_a_verifier_that_does_more_is_refused_by_its_line(script: str, words: str) -> None:
    with pytest.raises(Refused) as refused:
        verifier.test_files(script, FILES)
    assert words in str(refused.value)


def test_a_task_that_cannot_be_read_leaves_the_others_of_its_folder(tmp_path: Path) -> None:
    for name, text in (("a", "FROM"), ("b", "FROM python:3.12\nENV"), ("c", "FROM busybox")):
        (tmp_path / f"tasks/{name}/environment").mkdir(parents=True)
        (tmp_path / f"tasks/{name}/task.toml").write_text("")
        (tmp_path / f"tasks/{name}/environment/Dockerfile").write_text(text)
    found = list(sources.named("harbor")(tmp_path / "tasks", Clones(None), DirectoryObjects(tmp_path / "objects")))
    assert [(one.row, one.problem) for one in found] == [("a", None), ("b", None), ("c", None)]


def test_a_dockerfile_whose_image_was_built_may_do_anything(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x")
    stages = (
        "FROM golang AS one\nWORKDIR /go\nCOPY a.py .\nFROM ghcr.io/some/image\nRUN make all\nENV TOKEN=1\nUSER agent\n"
    )
    copies = "COPY --from=one /go/tool /usr/bin/\nCOPY a.py /etc/\nWORKDIR /app\nCOPY a.py b.py\nCMD ./server\n"
    (tmp_path / "Dockerfile").write_text(stages + copies)
    tree, place = docker.built(tmp_path, has_image=True)
    assert (sorted(tree), place) == (["b.py"], "/app")
    with pytest.raises(Refused, match="line 1"):
        docker.built(tmp_path)


def test_problems_begin_with_the_images_that_were_built_for_their_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        task = tmp_path / "tasks" / name
        (task / "environment").mkdir(parents=True)
        (task / "tests").mkdir()
        (task / "task.toml").write_text("")
        (task / "instruction.md").write_text("Make it pass.")
        (task / "environment/Dockerfile").write_text("FROM busybox\nWORKDIR /app\nCOPY a.py .\n")
        (task / "environment/a.py").write_text("x = 1\n")
        (task / "tests/test.sh").write_text("pytest /tests/test_a.py\n")
        (task / "tests/test_a.py").write_text("def test_a():\n    assert False\n")
    images = tmp_path / "images.json"
    images.write_text('{"a": "docker:etude-task:0123"}')
    found = own.from_source("harbor", tmp_path / "tasks", None, images)
    assert [(row.row, row.problem and row.problem.image) for row in found.rows] == [
        ("a", "docker:etude-task:0123"),
        ("b", None),  # it needs an image, and there is none
    ]
    images.write_text('{"a": "etude-task:0123"}')
    with pytest.raises(ProblemError, match=r"--images .*allowed: base:NAME"):
        own.from_source("harbor", tmp_path / "tasks", None, images)
