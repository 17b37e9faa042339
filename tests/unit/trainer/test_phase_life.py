"""A phase from its configuration to its checkpoint, and back after it died."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import phase_data
import pytest
import torch

from services.trainer.phases import report
from services.trainer.phases.config import BadPhase, Phase, PhaseConfig
from services.trainer.phases.phase import run
from services.trainer.phases.screen import Silent
from services.trainer.phases.state import Progress
from shared.model import load_checkpoint
from tests.patience import patient


class Died(Exception):
    pass


class Dies(Silent):
    """Ends the process, as far as a test can, right after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def step(self, progress: Progress, loss: float, tokens_per_s: float) -> None:
        if progress.step == self._step:
            raise Died


def lines(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / report.LOSSES).read_text().splitlines()]
    return [{name: of for name, of in line.items() if name != "seconds"} for line in found]


def whole(config: PhaseConfig, phase: Phase = "cpt") -> tuple[bytes, list[dict]]:
    assert run(config, phase, Silent()).finished
    out = Path(config.out)
    return (out / "model.safetensors").read_bytes(), lines(out)


def test_an_interrupted_phase_ends_with_the_same_weights_and_losses(tmp_path: Path) -> None:
    expected = whole(phase_data.pretraining(tmp_path))
    steps = max(line["step"] for line in expected[1])
    assert steps >= 6
    for at in (1, 4, steps):
        config = phase_data.pretraining(tmp_path, f"again-{at}")
        with pytest.raises(Died):
            run(config, "cpt", Dies(at))
        assert not Path(config.out).exists()
        assert whole(config) == expected
        assert not Path(config.out).with_name(f"again-{at}.work").exists()


def test_a_phase_that_is_asked_to_stop_goes_on_from_that_step(tmp_path: Path) -> None:
    expected = whole(phase_data.pretraining(tmp_path))
    config = phase_data.pretraining(tmp_path, "again")
    outcome = run(config, "cpt", Silent(), lambda: True)
    assert (outcome.finished, outcome.progress.step) == (False, 1)
    assert whole(config) == expected


def test_a_phase_lowers_the_loss_and_leaves_a_checkpoint_that_names_it(tmp_path: Path) -> None:
    config = phase_data.pretraining(tmp_path)
    outcome = run(config, "cpt", Silent())
    before, after = outcome.held_out["other"]
    assert after < before
    out = Path(config.out)
    assert load_checkpoint(out).config.vocab_size == 264
    card = json.loads((out / "etude.json").read_text())
    assert card["format"] == "chatml"
    assert [entry["phase"] for entry in card["phases"]] == ["cpt"]
    assert "| other | " in (out / "report.md").read_text()
    assert all((out / name).exists() for name in ("tokenizer.json", "config.json", report.LOSSES))


def test_a_phase_that_was_told_otherwise_does_not_go_on(tmp_path: Path) -> None:
    config = phase_data.pretraining(tmp_path)
    run(config, "cpt", Silent(), lambda: True)
    text = phase_data.PRETRAIN.format(out="made")
    changed = phase_data.configured(tmp_path, "cpt", text.replace("learning_rate = 3e-3", "learning_rate = 1e-3"))
    with pytest.raises(BadPhase, match=r"train.learning_rate: found 0.001; allowed: 0.003, as it began; or remove"):
        run(changed, "cpt", Silent())
    shutil.rmtree(tmp_path / "corpus")
    phase_data.tokens(tmp_path / "corpus", tmp_path / "start", phase_data.TEXTS[1:])
    again = phase_data.configured(tmp_path, "cpt", text)
    with pytest.raises(BadPhase, match=r"data.tokens .*corpus: it changed since the phase began"):
        run(again, "cpt", Silent())


def test_a_longer_context_stretches_positions_and_the_card_says_so(tmp_path: Path) -> None:
    phase_data.pretraining(tmp_path)
    text = (
        phase_data.PRETRAIN.format(out="long")
        .replace("length = 48", "length = 512")
        .replace("tokens = 900", "tokens = 200")
    )
    text += '[model]\nmtp_layers = 1\n[model.rope]\ntype = "yarn"\nfactor = 2.0\n'
    config = phase_data.configured(tmp_path, "extend", text)
    assert run(config, "extend", Silent()).finished
    made = load_checkpoint(config.out).config
    assert (made.rope.kind, made.rope.factor, made.rope.original_positions) == ("yarn", 2.0, 256)
    assert (made.max_position_embeddings, made.num_mtp_layers) == (512, 1)
    assert json.loads((Path(config.out) / "etude.json").read_text())["context"] == 512
    assert any("mtp_loss" in line for line in lines(Path(config.out)))


def test_the_mtp_phase_gives_a_checkpoint_mtp_layers_and_leaves_its_trunk(tmp_path: Path) -> None:
    config = phase_data.pretraining(tmp_path, "drafts", "mtp")
    assert run(config, "mtp", Silent()).finished
    before, after = load_checkpoint(config.checkpoint), load_checkpoint(config.out)
    assert after.config.num_mtp_layers == 1
    state = after.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in before.state_dict().items())
    drafts = [line["mtp_loss"] for line in lines(Path(config.out)) if "mtp_loss" in line]
    assert drafts[-1] < drafts[0]


def test_conversations_are_learned(tmp_path: Path) -> None:
    phase_data.pretraining(tmp_path)
    chats = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "yes"}]} for i in range(9)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chats))
    text = (
        'checkpoint = "start"\nout = "chat"\n[data]\nconversations = ["chats.jsonl"]\nheld_out = ["other"]\n'
        'held_out_conversations = ["chats.jsonl"]\nlength = 200\n[train]\nepochs = 4\nstep_tokens = 100\nlearning_rate = 1e-2\n'
        "warmup_steps = 0\n[measure]\nwindow = 40\nstride = 40\n"
    )
    outcome = run(phase_data.configured(tmp_path, "sft", text), "sft", Silent())
    before, after = outcome.held_out["chats.jsonl"]
    assert after < before / 2
    assert outcome.progress.targets >= 4 * 9 * 4


@pytest.mark.nightly
def test_a_phase_survives_kill_9_at_twenty_places(tmp_path: Path) -> None:
    expected = whole(phase_data.pretraining(tmp_path))
    config = phase_data.pretraining(tmp_path, "again")
    command = [
        sys.executable,
        "-c",
        "from services.trainer.train_cli import app; app()",
        "cpt",
        str(tmp_path / "phase.toml"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    losses = tmp_path / "again.work" / report.LOSSES

    def written() -> int:
        return losses.stat().st_size if losses.exists() else 0

    for kill in range(20):
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        deadline, sizes = time.monotonic() + patient(240), {written()}
        while process.poll() is None and len(sizes) < 2 + kill % 4 and time.monotonic() < deadline:
            sizes.add(written())
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if Path(config.out).exists():
            break
    if not Path(config.out).exists():
        subprocess.run(command, env=environment, check=True)
    assert ((Path(config.out) / "model.safetensors").read_bytes(), lines(Path(config.out))) == expected
