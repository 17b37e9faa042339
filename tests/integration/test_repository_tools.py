"""The tools of a repository attempt, each in a real sandbox."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from shared.contracts.messages import StopReason
from shared.contracts.trajectory import Change
from shared.environments import Call, Unrestorable, tools
from shared.environments.repository import runtime
from shared.environments.repository.index import FORMAT
from shared.environments.repository.problem import RepositoryLimits
from shared.environments.repository.workspace import RepositoryWorkspace
from tests.contract.sandboxes import NO_BWRAP
from tests.laboratory import CALC, FILES, Laboratory, call, called
from tests.plugins import forget

pytestmark = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def lab(tmp_path: Path, cache: Path) -> Laboratory:
    return Laboratory(tmp_path, cache)


def test_read_numbers_lines_and_takes_a_range(lab: Laboratory) -> None:
    async def scenario(box: RepositoryWorkspace) -> None:
        assert (await call(box, "read", path="README.md")).text == "     1\tArithmetic with units of length."
        part = await call(box, "read", path="calc.py", start=6, end=7)
        assert part.text == "     6\tdef add(a, b):\n     7\t    return a - b\n[lines 6-7 of 11]"
        for arguments, said in (
            ({"path": "none.py"}, "No such file or directory: /workspace/none.py"),
            ({"path": "tests"}, "Is a directory"),
            ({"path": "calc.py", "start": 50}, "argument 'start': found 50; allowed: 1 to 11, the lines of calc.py"),
            ({"path": "image"}, "image: a binary file; allowed: text"),
            ({"path": "a\0b"}, "NUL"),
        ):
            found = await call(box, "read", **arguments)
            assert not found.ok
            assert said in found.text
        own = "     1\troot:x:0:0:root:/root:/bin/sh\n     2\tagent:x:1000:1000:agent:/home/agent:/bin/bash"
        assert (await call(box, "read", path="/etc/passwd")).text == own  # not the host's

    lab.within(scenario, lab.problem({**FILES, "image": b"\0\1\2"}))


def test_edit_replaces_a_unique_text_and_names_the_candidates_otherwise(lab: Laboratory) -> None:
    async def scenario(box: RepositoryWorkspace) -> None:
        done = await call(box, "edit", path="calc.py", old="a - b", new="a + b")
        assert done.ok
        assert "     7\t    return a + b" in done.text
        twice = await call(box, "edit", path="calc.py", old="def ", new="async def ")
        assert (twice.ok, twice.text) == (
            False,
            "calc.py: 'old' occurs 2 times, at lines 6, 10; allowed: once. Add lines around it",
        )
        spaces = await call(box, "edit", path="calc.py", old="  return scale(a,  unit)", new="x")
        assert "White space differs at line 11; the file has:\n    11\t    return scale(a, unit)" in spaces.text
        similar = await call(box, "edit", path="calc.py", old="def added(a, b):", new="x")
        assert "Similar lines:\n     6\tdef add(a, b):" in similar.text
        assert "No line is similar" in (await call(box, "edit", path="calc.py", old="zzzzzz", new="x")).text
        assert not (await call(box, "edit", path="calc.py", old="", new="x")).ok
        work = await box.submission()
        assert work.changes == {"calc.py": Change(text=CALC.replace("a - b", "a + b"))}

    lab.within(scenario)


def test_write_list_and_grep(lab: Laboratory) -> None:
    async def scenario(box: RepositoryWorkspace) -> None:
        assert (
            await call(box, "write", path="new/deep/x.txt", content="one\ntwo\n")
        ).text == "created new/deep/x.txt, 2 lines"
        assert (await call(box, "write", path="README.md", content="")).text == "overwrote README.md, 0 lines"
        assert not (await call(box, "write", path="/usr/x", content="")).ok
        assert not (await call(box, "write", path="tests", content="")).ok
        assert (await call(box, "list", depth=1)).text == "README.md\ncalc.py\nnew/\ntests/\ntools/\nunits.py"
        assert "new/deep/x.txt" in (await call(box, "list", depth=3)).text
        assert (await call(box, "list", path="new/deep")).text == "x.txt"
        assert not (await call(box, "list", path="none")).ok
        assert (await call(box, "grep", pattern=r"^def s\w+")).text == (
            "calc.py:10:def scaled(a, unit):\nunits.py:4:def scale(value, unit):"
        )
        assert (
            await call(box, "grep", pattern="DEF ADD", ignore_case=True, glob="*.py")
        ).text == "calc.py:6:def add(a, b):"
        assert (await call(box, "grep", pattern="nowhere")).text == "no matches"
        assert not (await call(box, "grep", pattern="(")).ok
        assert not (await call(box, "grep", pattern="x", path="none")).ok

    lab.within(scenario)


def test_the_shell_keeps_its_folder_variables_and_background_processes(lab: Laboratory) -> None:
    async def scenario(box: RepositoryWorkspace) -> None:
        await call(box, "shell", command="cd tests; export A=1; f() { echo func; }; sleep 300 & echo $! > /tmp/pid")
        found = await call(box, "shell", command="pwd; echo $A; f; kill -0 $(cat /tmp/pid) && echo lives")
        assert found.text == "/workspace/tests\n1\nfunc\nlives"
        assert (await call(box, "shell", command="false")).text == "[exit code 1]"
        assert (await call(box, "shell", command="true")).text == "[no output]"
        assert "[exit code" in (await call(box, "shell", command="echo 'open")).text
        assert (await call(box, "shell", command="cat; echo read")).text == "read"
        assert (await call(box, "shell", command="exec >/dev/null; echo lost")).text == "[no output]"
        assert (await call(box, "shell", command="echo back; printf 'no newline'")).text == "back\nno newline"
        ended = await call(box, "shell", command="echo bye; exit 3")
        assert ended.text == "bye\n[the session ended; a new one begins with the next command]"
        assert (await call(box, "shell", command="pwd; echo .$A")).text == "/workspace/tests\n."
        killed = await call(box, "shell", command="sh -c 'kill -9 -1'; echo still")
        assert "session ended" in killed.text
        assert (await call(box, "read", path="README.md")).ok

    lab.within(scenario)


def test_a_workspace_is_restored_in_another_sandbox_and_says_what_is_gone(lab: Laboratory) -> None:
    saved: list[bytes | None] = []

    async def before(box: RepositoryWorkspace) -> None:
        await call(box, "write", path="new.py", content="X = 1\n")
        await call(
            box, "shell", command="rm README.md; chmod +x units.py; cd tests; export A=1; head -c 9 /dev/urandom > blob"
        )
        blob = await call(box, "shell", command="md5sum blob")
        saved.append(await box.save())
        await call(box, "shell", command="ln -s /etc link")
        saved.append(await box.save())
        told.append(blob.text)

    async def after(box: RepositoryWorkspace) -> None:
        assert saved[0] is not None
        await box.restore(saved[0])
        shell = await call(box, "shell", command="pwd; echo .$A; md5sum blob; ls ..; test -x ../units.py")
        notice, pwd, variable, blob, *files = shell.text.split("\n")
        assert "another machine" in notice
        assert (pwd, variable, blob) == ("/workspace/tests", ".", told[0])
        assert "new.py" in files
        assert "README.md" not in files
        assert await box.save() == saved[0]
        assert (await call(box, "shell", command="echo once")).text == "once"
        with pytest.raises(Unrestorable):
            await box.restore(b"damaged")

    told: list[str] = []
    lab.within(before)
    lab.within(after)
    assert saved[1] is None  # a link is no file that can be set back


def test_a_command_past_its_limit_is_a_result_and_the_next_one_works(lab: Laboratory) -> None:
    async def scenario(box: RepositoryWorkspace) -> None:
        found = await call(box, "shell", command="cd tools; A=1; echo begun; setsid sleep 600 & sleep 600")
        assert found.ok
        assert found.text == "begun\n[killed after 1 s]"
        assert (await call(box, "shell", command="pwd; echo $A; pgrep sleep")).text == (
            "/workspace/tools\n1\n[exit code 1]"
        )
        stubborn = await call(box, "shell", command="cd ..; B=2; trap '' INT; while :; do :; done")
        assert stubborn.text == "[killed after 1 s; a new session begins, its variables and processes are gone]"
        assert (await call(box, "shell", command="pwd; echo .$A$B; cd ..")).text == "/workspace/tools\n."
        assert (await call(box, "shell", command="ls")).text.split() == [
            "README.md",
            "calc.py",
            "tests",
            "tools",
            "units.py",
        ]

    lab.within(scenario, lab.problem(limits=RepositoryLimits(command_s=1.0)))


def test_long_output_is_cut_in_the_middle_and_kept_whole_in_a_file(lab: Laboratory) -> None:
    async def scenario(box: RepositoryWorkspace) -> None:
        found = await call(box, "shell", command="seq 1 20000")
        assert len(found.text) < 8200
        assert "lines left out; all of it: /tmp/output-1.txt]" in found.text
        assert found.text.startswith("1\n2\n")
        assert found.text.endswith("19999\n20000")
        assert (await call(box, "shell", command="md5sum < /tmp/output-1.txt")).text == (
            await call(box, "shell", command="seq 1 20000 | head -c -1 | md5sum")
        ).text
        part = await call(box, "read", path="/tmp/output-1.txt", start=10_000, end=10_000)
        assert part.text.startswith(" 10000\t10000\n")
        flood = await call(box, "shell", command="head -c 30000000 /dev/zero | tr '\\0' x; echo; echo end")
        assert flood.text.endswith("\nend")

    lab.within(scenario)


def test_search_finds_code_by_its_words_and_keeps_its_index(lab: Laboratory) -> None:
    async def scenario(box: RepositoryWorkspace) -> None:
        found = await call(box, "search", query="factors of length units")
        assert found.text.splitlines()[0] in ("/workspace/units.py:1-6", "/workspace/README.md:1-2")
        assert "units.py" in found.text
        await call(box, "shell", command="rm units.py")
        assert "No such file" in (await call(box, "search", query="factors scale value")).text
        assert (await call(box, "search", query="!")).text == "nothing found"

    problem = lab.problem(tools=["search", "shell", "submit"])
    lab.within(scenario, problem)
    assert (lab.places.cache / "indexes" / f"{problem.tree.checksum}-{problem.tree.size}-{FORMAT}").is_dir()
    lab.within(scenario, problem)


def test_todo_is_a_checklist_that_behaviour_terms_read(lab: Laboratory) -> None:
    from services.reward.terms.todo_unfinished import _OPEN_ITEM, NOTE

    async def scenario(box: RepositoryWorkspace) -> None:
        await call(box, "todo", open=["fix add", "fix\nkm"], done=["look"])
        assert box.notes[NOTE] == "- [x] look\n- [ ] fix add\n- [ ] fix km"
        assert _OPEN_ITEM.findall(box.notes[NOTE]) == ["fix add", "fix km"]

    lab.within(scenario, lab.problem(tools=["todo", "submit"]))


def test_submit_ends_the_attempt_and_later_calls_are_passed_over(lab: Laboratory) -> None:
    async def scenario(box: RepositoryWorkspace) -> None:
        results = await box.call(
            called(("submit", {}), ("write", {"path": "x", "content": ""}), ("read", {"path": "x"}))
        )
        assert results[0].ends is StopReason.submitted
        assert [result.ran for result in results] == [True, False, False]
        assert (await box.submission()).changes == {}

    lab.within(scenario)


def test_a_message_without_a_call_ends_the_attempt(lab: Laboratory) -> None:
    async def scenario(box: RepositoryWorkspace) -> None:
        assert await box.final("I am done.") is None

    lab.within(scenario)


def test_readers_run_together_and_writers_in_order(lab: Laboratory) -> None:
    async def scenario(box: RepositoryWorkspace) -> None:
        running: list[int] = []
        most: list[int] = []
        read = box.box.files.read

        async def slowly(path: str, cap: int) -> tuple[bytes, bool]:
            running.append(1)
            most.append(len(running))
            await asyncio.sleep(0.05)
            running.pop()
            return await read(path, cap)

        box.box.files.read = slowly  # type: ignore[method-assign]
        one = ("read", {"path": "README.md"})
        results = await box.call(called(one, one, one, ("write", {"path": "README.md", "content": "new"}), one))
        assert [result.call for result in results] == ["c0", "c1", "c2", "c3", "c4"]
        assert max(most) == 3
        assert [result.text.endswith("new") for result in results] == [False, False, False, False, True]

    lab.within(scenario)


def test_a_call_that_was_refused_or_is_not_offered_changes_nothing(lab: Laboratory) -> None:
    async def scenario(box: RepositoryWorkspace) -> None:
        wrong = Call("a", "write", {"path": "x"}, 0, 0, error="argument 'content': missing")
        foreign = Call("b", "web_search", {"query": "x"}, 0, 0)
        first, second = await box.call([wrong, foreign])
        assert (first.ok, first.text) == (False, "argument 'content': missing")
        assert (second.ok, second.text) == (False, "tool 'web_search': not offered")

    lab.within(scenario)


def test_a_submission_holds_text_binary_modes_and_deletions_and_no_links(lab: Laboratory) -> None:
    async def scenario(box: RepositoryWorkspace) -> None:
        await call(
            box,
            "shell",
            command="printf '\\377\\0' > bin; chmod +x README.md; rm -r tools; ln -s / out; mkfifo pipe; "
            "mkdir -p __pycache__ .git; touch __pycache__/x.pyc .git/HEAD; touch -d 2000-01-01 calc.py",
        )
        work = await box.submission()
        assert work.changes == {
            "bin": Change(data=b"\xff\0"),
            "README.md": Change(text=FILES["README.md"], executable=True),
            "tools/run.sh": Change(),
        }
        assert "2 paths are no regular files" in box.notes["left_out"]
        assert "out: a link to /" in box.notes["left_out"]

    lab.within(scenario)


def test_too_many_changes_are_told_at_submit_and_nothing_is_submitted_otherwise(lab: Laboratory) -> None:
    async def scenario(box: RepositoryWorkspace) -> None:
        await call(box, "shell", command="for i in $(seq 2500); do : > f$i; done")
        refused = await call(box, "submit")
        assert (refused.ok, refused.ends) == (False, None)
        assert refused.text == "cannot submit: found 2500 changed files; allowed: at most 2000"
        assert (await box.submission()).changes == {}
        assert box.notes["submission"].startswith("nothing was submitted: found 2500")
        await call(box, "shell", command="rm f*; head -c 40000000 /dev/zero > big")
        assert (await call(box, "submit")).text == (
            "cannot submit: found 40000000 bytes in changed files, big the largest; allowed: at most 33554432"
        )

    lab.within(scenario)


def test_an_agent_that_closes_its_folder_or_eats_all_processes_loses_nothing_of_ours(lab: Laboratory) -> None:
    async def scenario(box: RepositoryWorkspace) -> None:
        await call(box, "write", path="x", content="1")
        await call(box, "shell", command="chmod 000 /workspace")
        await box.box.files.close()
        assert (await box.submission()).changes == {"x": Change(text="1")}
        bomb = await call(box, "shell", command="b() { b | b & }; b; sleep 60")
        assert bomb.ok
        await box.box.files.close()
        assert (await box.submission()).changes == {"x": Change(text="1")}

    lab.within(scenario, lab.problem(limits=RepositoryLimits(command_s=2.0, processes=40)))


def test_nothing_of_an_attempt_is_left(lab: Laboratory) -> None:
    import psutil

    folders: list[Path] = []

    async def scenario(box: RepositoryWorkspace) -> None:
        await call(box, "shell", command="sleep 4711 & sleep 0.1")
        await call(box, "read", path="README.md")
        sandbox = box.sandbox
        folders.append(sandbox._inner._place.folder)  # type: ignore[attr-defined]

    lab.within(scenario)
    assert not any(folder.exists() for folder in folders)
    assert not [one for one in psutil.process_iter(["cmdline"]) if "4711" in (one.info["cmdline"] or [])]


def test_setup_runs_before_the_agent_and_is_no_change_of_its_own(lab: Laboratory) -> None:
    async def scenario(box: RepositoryWorkspace) -> None:
        assert (await call(box, "read", path="built")).text == "     1\tmade"
        await call(box, "write", path="x", content="")
        assert list((await box.submission()).changes) == ["tools/x"]
        assert (await call(box, "shell", command="pwd")).text == "/workspace/tools"

    lab.within(scenario, lab.problem(setup=["echo made > built"], workdir="tools"))


def test_the_sandbox_has_python_and_pytest_and_nothing_else_of_this_environment(lab: Laboratory) -> None:
    async def scenario(box: RepositoryWorkspace) -> None:
        assert "1 passed" in (await call(box, "shell", command="pytest -q tests -p no:cacheprovider")).text
        for name in ("numpy", "msgspec", "pip", "shared"):
            assert "ModuleNotFoundError" in (await call(box, "shell", command=f"python -c 'import {name}'")).text
        assert (await call(box, "shell", command=f"touch {runtime.HOME}/x {runtime.SITE}/pytest/x")).text.count(
            "Read-only"
        ) == 2

    lab.within(scenario)


def test_a_runtime_with_missing_files_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = runtime.made(tmp_path)
    (first / "bin" / "pytest").unlink()
    second = runtime.made(tmp_path)
    assert second != first
    assert (second / "bin" / "pytest").is_file()
    assert runtime.made(tmp_path) == second


def test_the_documented_example_is_a_tool_that_works_and_stands_in_the_documentation(
    lab: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = Path(__file__).parents[2] / "docs"
    assert f"```python\n{(docs / 'examples' / 'outline.py').read_text()}```" in (docs / "tools.md").read_text()
    monkeypatch.syspath_prepend(docs / "examples")
    monkeypatch.setitem(tools.PLUGINS.own, "outline", "outline:Tool")
    forget("outline")

    async def scenario(box: RepositoryWorkspace) -> None:
        assert (await call(box, "outline", path="calc.py")).text == "6: add\n10: scaled"
        assert not (await call(box, "outline", path="README.md")).ok

    problem = lab.problem(tools=["outline", "submit"])
    assert lab.environment.objection(problem) is None
    lab.within(scenario, problem)
    forget("outline")
