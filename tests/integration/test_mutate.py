"""`etude tasks mutate` on a part of the installed code: what a pack promises."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.curator import build
from services.curator.fuzz import MAX_VISIBLE, shown
from services.curator.lift import MAX_CHARS, MAX_LINES
from services.curator.mine import inventory
from shared.environments.function import gate
from shared.objects.directory import DirectoryObjects
from shared.problems import FunctionHidden, FunctionProblem
from shared.problems.pack import decompress, read_hidden, read_problems
from shared.problems.signatures import Signatures, fingerprint, write_signatures
from shared.problems.splits import SPLITS, split_of
from shared.problems.values import show
from shared.sandbox import connect
from tests.patience import patient

FILES = 45
SANDBOX = "bubblewrap" if shutil.which("bwrap") else "process"
pytestmark = pytest.mark.slow


def mutate(out: Path, *options: str, seed: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.curator.cli", "mutate", "--out", str(out), "--limit", str(FILES)]
    return subprocess.run(
        [*command, "--sandbox", SANDBOX, *options],
        env={**os.environ, "PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=patient(280),
    )


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pack") / "a"
    done = mutate(out, "--include-seen")
    assert done.returncode == 0, done.stderr
    return out


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def pairs(folder: Path, split: str) -> list[tuple[FunctionProblem, FunctionHidden]]:
    hidden = {item.id: item for item in read_hidden((folder / f"{split}.hidden.jsonl.zst").read_bytes())}
    return [(item, hidden[item.id]) for item in read_problems((folder / f"{split}.public.jsonl.zst").read_bytes())]


def everything(folder: Path) -> list[tuple[str, FunctionProblem, FunctionHidden]]:
    return [(split, *pair) for split in SPLITS for pair in pairs(folder, split)]


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def test_equal_bytes_for_any_hash_seed_and_number_of_processes(pack: Path, tmp_path: Path):
    done = mutate(tmp_path / "b", "--include-seen", "--processes", "1", seed=7)
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "b") == content(pack)


@pytest.mark.timeout(600)
def test_a_pack_that_is_there_is_left_as_it_is_and_a_damaged_one_is_made_anew(pack: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(pack, copy)
    before = copy.stat().st_ino
    assert mutate(copy, "--include-seen").returncode == 0
    assert copy.stat().st_ino == before
    (copy / "rl.public.jsonl.zst").write_bytes(b"")
    assert mutate(copy, "--include-seen").returncode == 0
    assert content(copy) == content(pack)


def test_problems_are_small_single_line_bugs_with_what_an_agent_needs_to_see(pack: Path):
    problems = everything(pack)
    assert len(problems) > 20
    for _, problem, hidden in problems:
        (broken,), (solution,) = problem.files.values(), hidden.solution.values()
        good, bad = solution.split("\n"), broken.split("\n")
        assert sum(a != b for a, b in zip(good, bad, strict=True)) == 1
        assert len(bad) <= MAX_LINES
        assert len(solution) <= MAX_CHARS
        assert 2 <= len(problem.visible) <= 3
        assert len(problem.actual) == len(problem.visible)
        assert all(len(shown(c.args)) + len(show(c.expected)) <= MAX_VISIBLE for c in problem.visible)
        assert len(hidden.cases) >= 5
        assert not {c.args for c in hidden.cases} & {c.args for c in problem.visible}
        assert problem.origin.count(":") == 2
        assert problem.licence
        assert hidden.bug
        assert problem.prompt


def test_every_problem_passes_the_gate_of_the_service_in_sandboxes_of_its_own(pack: Path):
    functions = connect(SANDBOX, 2)
    try:
        outcomes = asyncio.run(gate.check(functions, [(problem, hidden) for _, problem, hidden in everything(pack)]))
    finally:
        functions.close_sync()
    assert {outcome.reason for outcome in outcomes} == {""}
    assert all(outcome.proven for outcome in outcomes)


def test_no_problem_comes_from_a_module_that_every_sandbox_carries(pack: Path):
    """Its function would lie in the agent's own process."""
    carried = build._carried(SANDBOX)
    assert {"json.decoder", "os.path", "stat", "ntpath", "_operator"} <= carried
    origins = {
        problem.origin.split(":")[1] for _, problem, _ in everything(pack) if problem.origin.startswith("python:")
    }
    assert origins
    assert origins.isdisjoint(carried)


def test_splits_follow_the_module_and_share_no_function_and_no_near_duplicate(pack: Path):
    others = Signatures()
    of_split: dict[str, set[str]] = {split: set() for split in SPLITS}
    for split, problem, hidden in everything(pack):
        distribution, module, _ = problem.origin.split(":")
        assert split_of(distribution, module) == split
        of_split[split].add(next(iter(hidden.solution.values())))
    for split in ("held_out", "dev", "rl"):
        for source in of_split[split]:
            assert not others.has_near(*fingerprint(source))
        for source in of_split[split]:
            others.add(*fingerprint(source))
    texts = [json.loads(line) for line in decompress((pack / "pretrain.jsonl.zst").read_bytes()).splitlines()]
    assert of_split["train"] <= {text["source"] for text in texts}
    assert not any(others.has_near(*fingerprint(text["source"])) for text in texts)


def test_what_a_base_policy_has_seen_leaves_every_split_but_train(pack: Path, tmp_path: Path):
    seen = [next(iter(hidden.solution.values())) for _, hidden in pairs(pack, "rl")]
    write_signatures(seen, tmp_path / "seen.npz")
    done = mutate(tmp_path / "b", "--exclude-signatures", str(tmp_path / "seen.npz"))
    assert done.returncode == 0, done.stderr
    assert pairs(tmp_path / "b", "rl") == []
    assert content(tmp_path / "b")["train.public.jsonl.zst"] == content(pack)["train.public.jsonl.zst"]


def test_the_manifest_counts_and_names_origins_and_licences(pack: Path):
    facts = manifest(pack)
    for split in SPLITS:
        own = pairs(pack, split)
        assert facts["splits"][split]["problems"] == len(own) == sum(facts["splits"][split]["kinds"].values())
        assert {p.origin.split(":")[0] for p, _ in own} == set(facts["splits"][split]["distributions"])
    assert facts["distributions"]["python"]["licence"] == "PSF-2.0"
    assert facts["python"].count(".") == 2


def test_distributions_beside_the_installed_ones_are_read_where_asked(tmp_path: Path):
    facts = tmp_path / "boltons-1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: boltons\nVersion: 1\nLicense-Expression: BSD-3-Clause\n"
    )
    (facts / "RECORD").write_text("boltons/iterutils.py,,\n")
    assert "boltons" not in inventory().versions
    found = inventory(tmp_path)
    assert (found.versions["boltons"], found.licences["boltons"]) == ("1", "BSD-3-Clause")
    (file,) = (file for file in found.files if file.distribution == "boltons")
    assert (file.path, file.split) == (str(tmp_path / "boltons" / "iterutils.py"), "train")


def test_the_project_itself_is_no_source_of_problems():
    assert "etude" not in inventory().versions


def test_a_build_that_is_killed_leaves_nothing(tmp_path: Path):
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "services.curator.cli", "mutate", "--out", str(out), "--limit", str(FILES)]
    process = subprocess.Popen([*command, "--sandbox", SANDBOX], stderr=subprocess.DEVNULL)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2.5)
    process.kill()
    process.wait()
    assert not out.exists()


def test_an_unknown_sandbox_is_an_error_and_leaves_nothing(tmp_path: Path):
    done = mutate(tmp_path / "x", "--sandbox", "cardboard")
    assert done.returncode == 2
    assert "cardboard" in done.stderr
    assert "bubblewrap" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_it_did_not_make_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years")
    done = mutate(tmp_path)
    assert done.returncode == 2
    assert "something that is no pack" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_what_is_left_of_a_pack_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").touch()  # as a power loss may leave it
    (tmp_path / "rl.public.jsonl.zst").touch()
    done = mutate(tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "manifest.json").read_text())["verified"]


def test_imported_problems_are_not_replaced_by_mined_ones(tmp_path: Path) -> None:
    build.write_own(tmp_path / "mine", {"rl": []}, DirectoryObjects(tmp_path / "objects"))
    before = sorted((tmp_path / "mine").iterdir())
    done = mutate(tmp_path / "mine")
    assert (done.returncode, sorted((tmp_path / "mine").iterdir())) == (2, before)
    assert "imported problems" in done.stderr
