"""A phase on several ranks: the numbers of one process, whatever the layout, and on from where any layout stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path

import phase_data
import pytest
import torch
from rank_processes import Ended, run_ranks
from safetensors.torch import load_file

from services.trainer.phases import report
from services.trainer.phases.config import Phase, PhaseConfig
from services.trainer.phases.phase import run
from services.trainer.phases.screen import Silent
from services.trainer.phases.state import STATE
from shared.model import load_checkpoint

pytestmark = pytest.mark.timeout(2000)  # see rank_processes.DEADLINE_S
SCRIPT = Path(__file__).parent / "ranks_of_a_phase.py"
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
# Adam's early steps follow the signs of gradients: where one is next to nothing, a last bit turns the whole step. With a small
# rate that stays below the tolerance.
CPT = phase_data.PRETRAIN.replace("tokens = 900", "tokens = 500").replace(
    "learning_rate = 3e-3", "learning_rate = 1e-4\nmtp = 'on'\nbalance = 0.1"
)
SFT = """
checkpoint = "start"
out = "{out}"
[data]
conversations = ["chats.jsonl"]
held_out_conversations = ["chats.jsonl"]
length = 200
context_weight = 0.25
[train]
epochs = 4
step_tokens = 100
micro_batch_tokens = 60
learning_rate = 1e-4
warmup_steps = 2
[measure]
window = 40
stride = 40
"""
MTP = CPT.replace("mtp = 'on'\n", "")
TEXTS: dict[Phase, str] = {
    "cpt": CPT,
    "extend": CPT + '[model.rope]\ntype = "yarn"\nfactor = 2.0\n',
    "sft": SFT,
    "mtp": MTP,
}
MACHINE = "[machine]\nzero_stage = {0}\ncontext_ranks = {1}\nexpert_ranks = {2}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A mixture of experts with an MTP layer, a corpus and conversations."""
    start = phase_data.checkpoint(tmp_path / "start", **EXPERTS)
    phase_data.tokens(tmp_path / "corpus", start, phase_data.TEXTS)
    phase_data.tokens(tmp_path / "other", start, ["class Other:\n    pass\n" * 4, "x = 1\n" * 9])
    chats = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "yes" * (1 + i % 4)}]}
        for i in range(9)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chats))
    return tmp_path


def configured(folder: Path, phase: Phase, name: str, layout: tuple[int, int, int] = (0, 1, 1)) -> PhaseConfig:
    """Write NAME.toml for a phase whose checkpoint will be NAME. `layout`: ZeRO stage, context ranks, expert ranks."""
    text = TEXTS[phase].format(out=name) + MACHINE.format(*layout)
    return phase_data.configured(folder, phase, text, f"{name}.toml")


def on_ranks(ranks: int, *jobs: tuple[Phase, PhaseConfig, int]) -> list[Ended]:
    told = [f"{phase}:{Path(config.out)}.toml:{steps}" for phase, config, steps in jobs]
    ended = run_ranks(SCRIPT, told, ranks)
    assert [rank.code for rank in ended] == [0] * ranks, [rank.said for rank in ended]
    return ended


def lines(out: str) -> list[dict[str, object]]:
    """Return the losses file without what depends on the clock and on the ranks."""
    found = [json.loads(line) for line in (Path(out) / report.LOSSES).read_text().splitlines()]
    return [{name: of for name, of in line.items() if name not in ("seconds", "tokens_fed")} for line in found]


def assert_close(found: object, expected: object, where: str) -> None:
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        assert found.keys() == expected.keys(), where
        for name, of in expected.items():
            assert_close(found[name], of, f"{where} {name}")
    elif isinstance(expected, list):
        assert isinstance(found, list)
        assert len(found) == len(expected), where
        for at, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{where} {at}")
    elif isinstance(expected, float):
        assert isinstance(found, float)
        assert math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-7), (where, found, expected)
    else:
        assert found == expected, where


def state(config: PhaseConfig) -> dict[str, torch.Tensor]:
    return load_file(Path(f"{config.out}.work") / STATE)


def stops_after_two(config: PhaseConfig, phase: Phase) -> None:
    answers = iter((False, True))
    assert not run(config, phase, Silent(), lambda: next(answers)).finished


# Each is one start of two ranks.
@pytest.mark.parametrize(
    "cases",
    [
        [("cpt", (1, 1, 1)), ("cpt", (2, 1, 2)), ("sft", (0, 2, 1))],
        pytest.param(
            [("cpt", (0, 2, 1)), ("cpt", (0, 2, 2)), ("extend", (2, 2, 1)), ("sft", (0, 1, 2))],
            marks=pytest.mark.nightly,
        ),
        pytest.param([("mtp", (0, 1, 1)), ("mtp", (0, 2, 1)), ("mtp", (0, 1, 2))], marks=pytest.mark.nightly),
    ],
    ids=["cpt and sft", "more layouts", "mtp"],
)
def test_two_ranks_make_the_steps_of_one_process(cases: list[tuple[Phase, tuple[int, int, int]]], folder: Path) -> None:
    """After two steps the losses of both, the held-out loss before, and the gradients' means."""
    told: list[tuple[Phase, PhaseConfig, int]] = [
        (phase, configured(folder, phase, f"{phase}-{'-'.join(map(str, layout))}", layout), 2)
        for phase, layout in cases
    ]
    on_ranks(2, *told)
    for phase, config, _ in told:
        alone = configured(folder, phase, f"{phase}-alone")
        if not Path(f"{alone.out}.work").exists():
            stops_after_two(alone, phase)
        expected, found = state(alone), state(config)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            if name.endswith(":exp_avg") and tensor.norm() > 0:
                assert float((found[name] - tensor).norm() / tensor.norm()) <= 1e-5, (config.out, name)
        assert_close(lines(f"{config.out}.work"), lines(f"{alone.out}.work"), config.out)


def test_an_interrupted_phase_on_two_ranks_ends_bit_for_bit_and_another_layout_goes_on_from_it(folder: Path) -> None:
    layout = (1, 1, 2)
    whole, cut, later = (configured(folder, "cpt", name, layout) for name in ("whole", "cut", "later"))
    ended = on_ranks(2, ("cpt", whole, 0), ("cpt", cut, 2), ("cpt", cut, 0), ("cpt", later, 2))
    assert [rank.lines for rank in ended] == [["finished", "stopped", "finished", "stopped"]] * 2
    assert lines(cut.out) == lines(whole.out)
    weights = [(Path(config.out) / "model.safetensors").read_bytes() for config in (whole, cut)]
    assert weights[0] == weights[1]
    assert (
        load_checkpoint(whole.out).config.num_mtp_layers == 1
    )  # rank 0 wrote all experts, those of the other rank too
    # One process goes on from what two ranks wrote.
    alone = configured(folder, "cpt", "later")
    assert run(alone, "cpt", Silent()).finished
    assert_close(lines(alone.out), lines(whole.out), "one process")


@pytest.mark.nightly
def test_other_layouts_go_on_from_what_one_process_wrote(folder: Path) -> None:
    whole = configured(folder, "cpt", "whole")
    assert run(whole, "cpt", Silent()).finished
    for name, another in (("first", (2, 1, 1)), ("second", (0, 2, 1)), ("third", (1, 2, 2))):
        stops_after_two(configured(folder, "cpt", name), "cpt")
        config = configured(folder, "cpt", name, another)
        on_ranks(2, ("cpt", config, 0))
        assert_close(lines(config.out), lines(whole.out), name)


def test_ranks_that_cannot_work_together_say_why_before_anything_is_written(folder: Path) -> None:
    context, expert = (configured(folder, "cpt", f"bad{i}", (0, *of)) for i, of in enumerate([(3, 1), (1, 4)]))
    for rank in (0, 1):
        text = TEXTS["cpt"].format(out="told").replace("seed = 3", f"seed = {rank}")
        told = phase_data.configured(folder, "cpt", text, f"told{rank}.toml")
    ended = run_ranks(
        SCRIPT, [f"cpt:{context.out}.toml:0", f"cpt:{expert.out}.toml:0", f"cpt:{told.out}{{rank}}.toml:0"], 2
    )
    for rank in ended:
        assert rank.code == 0, rank.said
        assert rank.lines[:2] == [
            "machine.context_ranks: found 3 of 2 ranks; allowed: 1, 2",
            "machine.expert_ranks: found 4 of 2 ranks; allowed: 1, 2",
        ]
        assert rank.lines[2].startswith(
            "rank 1: the configuration: found something else than rank 0; allowed: the same"
        )
    made = [Path(f"{config.out}{end}") for config in (context, expert, told) for end in ("", ".work")]
    assert not any(path.exists() for path in made)
