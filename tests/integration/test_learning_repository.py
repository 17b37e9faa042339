"""Generated repository problems, their scripted solver, and the machinery of `benchmarks.learning.repository`."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.learning import repository, small
from benchmarks.learning.policy import UNSAID, Policy
from benchmarks.learning.repositories import Task, generate
from benchmarks.learning.scripted import MemoryWorkspace, brief_of, trace, turns
from benchmarks.learning.templates import SPLITS, TEMPLATES, split_of
from shared.contracts.messages import Verdict
from shared.contracts.run import Sampling, TrainConfig
from shared.contracts.trajectory import Submission
from shared.environments import Call, Grading, Result, Workspace
from shared.model import causal_rows, load_checkpoint, published
from shared.renderers.formats.chatml import ChatML
from tests.contract.sandboxes import NO_BWRAP
from tests.laboratory import Laboratory

BEYOND: list[tuple[str, dict[str, Any]]] = [  # what a solver does not call, but a model may
    ("read", {"path": "nowhere.py"}),
    ("read", {"path": "README.md", "start": 1, "end": 1}),
    ("grep", {"pattern": "return"}),
    ("grep", {"pattern": "no such text"}),
    ("edit", {"path": "README.md", "old": "not there", "new": "x"}),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny = repository.PLANS["tiny"]
    small.create(folder, model=tiny.shape, vocabulary=tiny.vocabulary, texts=tiny.texts)
    return folder


def test_a_seed_gives_the_same_problems_and_another_seed_others() -> None:
    first, again, other = generate("train", 20, 1), generate("train", 20, 1), generate("train", 20, 2)
    assert first == again
    assert not {t.problem.tree.checksum for t in first} & {t.problem.tree.checksum for t in other}
    assert len({t.problem.tree.checksum for t in first}) == 20
    assert first[:5] == generate("train", 5, 1)  # more problems begin with the same ones


def test_no_two_splits_share_a_template_or_a_word() -> None:
    for one, two in itertools.combinations(SPLITS, 2):
        for part in ("source", "name"):
            assert not {getattr(t, part) for t in TEMPLATES[one]} & {getattr(t, part) for t in TEMPLATES[two]}
    for split in SPLITS:
        assert len({t.source for t in TEMPLATES[split]}) == len(TEMPLATES[split])
        for task in generate(split, 30, 4):
            named = re.findall(r"\w+", " ".join((task.function.replace("_", " "), task.path.removesuffix(".py"))))
            singular = [name.removesuffix("s") for name in named]
            assert {split_of(name) for name in singular} == {split}


@pytest.mark.parametrize("split", SPLITS)
def test_a_problem_is_one_line_away_from_its_solution(split: str) -> None:
    for task in generate(split, 40, 3):
        assert 3 <= len(task.files) <= 6
        solved = task.hidden.solution[task.path].text
        assert task.files[task.path].count(task.old) == 1
        assert task.files[task.path].replace(task.old, task.new) == solved
        assert task.hidden.fail_to_pass
        assert task.hidden.pass_to_pass
        assert task.named == (task.path in task.problem.prompt)
        assert task.function in task.problem.prompt


@pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)
def test_the_environment_takes_the_script_s_work_and_not_the_tree_as_it_is(tmp_path: Path) -> None:
    lab = Laboratory(tmp_path)
    tasks = [task for split in SPLITS for task in generate(split, 2, 5, lab.objects)]

    async def check(task: Task) -> None:
        assert lab.environment.objection(task.problem) is None
        assert lab.environment.brief(task.problem) == brief_of(task)
        memory, real = MemoryWorkspace(task), await lab.environment.open(task.problem, Sampling())
        try:
            assert real.limits == memory.limits
            for number, (name, arguments) in enumerate([*BEYOND, *turns(task)]):
                calls = [Call(str(number), name, arguments, 0, 0)]
                answers = await memory.call(calls), await real.call(calls)
                assert _comparable(answers[0]) == _comparable(answers[1])
            work = [await _work(memory), await _work(real)]
        finally:
            await real.close()
        assert work[0] == work[1]
        verdicts = await lab.environment.grade(
            [Grading(task.problem, task.hidden, submission) for submission in (work[1], Submission())]
        )
        assert all(isinstance(verdict, Verdict) for verdict in verdicts)
        assert [verdict.solved for verdict in verdicts if isinstance(verdict, Verdict)] == [True, False]

    async def check_all() -> None:
        await asyncio.gather(*map(check, tasks))

    asyncio.run(check_all())


def _comparable(results: list[Result]) -> list[tuple[str, bool, object]]:
    return [(result.text, result.ok, result.ends) for result in results]


async def _work(workspace: Workspace) -> Submission:
    return await workspace.submission()


def test_a_trace_holds_what_the_agent_records_with_a_mask_on_what_was_said(checkpoint: Path) -> None:
    renderer = ChatML.load(checkpoint)
    for task in generate("train", 6, 7):
        segment = trace(task, renderer)
        segment.check()
        said = renderer.vocabulary.text(segment.tokens[segment.loss_mask].tolist())
        assert said.count("<tool_call>") == len(list(turns(task)))
        assert json.dumps(task.new, ensure_ascii=False) in said
        assert task.problem.prompt not in said


def test_the_product_s_loss_on_a_script_is_its_negative_log_likelihood(checkpoint: Path, tmp_path: Path) -> None:
    config = TrainConfig(importance_clip=1.0, norm_tokens=100.0, router_replay=False, mtp=False, learning_rate=0.0)
    lab = Laboratory(tmp_path)
    policy = Policy(checkpoint, config, lab.objects, tmp_path / "cache")
    tasks = generate("train", 3, 8)
    trained = policy.sft(tasks, 1, 0.0)
    model, expected = load_checkpoint(checkpoint), 0.0
    with torch.no_grad(), published(model):
        for task in tasks:
            segment = trace(task, policy.format)
            tokens = torch.from_numpy(segment.tokens.astype(np.int64))
            hidden = model(tokens[:-1], torch.arange(len(tokens) - 1), causal_rows(1, len(tokens) - 1)).hidden_ND
            logprobs = model.logits(hidden).log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            expected -= float(logprobs[torch.from_numpy(segment.loss_mask[1:])].sum())
    assert trained.applied
    assert UNSAID < -20
    assert trained.metrics["loss"] == pytest.approx(expected / (100.0 * len(tasks)), rel=1e-4)


def test_a_run_goes_through_every_stage_and_on_from_where_a_sitting_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(repository.PLANS, "tiny", replace(repository.PLANS["tiny"], traces=60, held_out=2, samples=1))
    options = ["--quick", "--resume", str(tmp_path / "run"), "--tools", "memory", "--threads", "1"]
    with pytest.raises(repository.SittingOver):
        repository.Run(tmp_path / "run", "tiny", 0.1, sitting=0.0, sandbox=False, threads=1).base()
    assert (tmp_path / "run" / "pretrain" / "state.safetensors").is_file()
    repository.Run(tmp_path / "run", "tiny", 0.1, sitting=10.0, sandbox=False, threads=1).base()
    assert repository.main([*options, "--sitting", "0"]) == 0
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert state["done"] == ["base"]
    assert list(state["evaluations"]) == ["before_sft"]
    assert repository.main([*options, "--sitting", "0"]) == 0  # one step of SFT
    assert json.loads((tmp_path / "run" / "state.json").read_text())["steps"] == {"sft": 1}
    out = tmp_path / "records.json"
    assert repository.main([*options, "--json", str(out)]) == 0
    state = json.loads((tmp_path / "run" / "state.json").read_text())
    assert state["done"] == ["base", "sft", "rl"]
    assert tuple(state["evaluations"]) == repository.EVALUATIONS
    assert state["steps"]["sft"] >= 2
    assert state["steps"]["rl"] >= 1
    ids = {record["id"] for record in json.loads(out.read_text())}
    assert {f"learning.repository.{name}" for name in (*repository.EVALUATIONS, "sft_gain", "rl_gain")} <= ids
    assert (tmp_path / "run" / "curve.png").stat().st_size > 1000
