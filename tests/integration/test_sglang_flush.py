"""`flush_on_swap` with the real SGLang on this machine's CPU: what was running computes its cache again under the new version."""

from __future__ import annotations

import asyncio
import base64
import signal
from typing import Any

import numpy as np
import pytest
import torch

from shared.model import causal_rows
from tests.integration import engine_platform
from tests.integration.engine_platform import Platform, ask, body_of, start_process
from tests.integration.sglang_served import computing
from tests.patience import patient
from tests.sglang import KINDS, interpreter

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
START_S, SAME = 900, 1e-4
ASKED = {"extra_key": "0", "return_routed_experts": True}


def test_what_runs_over_a_swap_goes_on_with_keys_and_values_of_the_new_version(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_platform, "START_S", START_S)
    python, p = interpreter(), Platform(tmp_path, KINDS["qwen3_moe"], context=256)
    p.write_version(0, None)
    asyncio.run(p.start_run())
    process, url = start_process(
        p,
        ETUDE_ENGINE="sglang",
        ETUDE_SGLANG_PYTHON=python,
        ETUDE_SGLANG_DEVICE="cpu",
        ETUDE_SGLANG_DTYPE="float32",
        ETUDE_FLUSH_ON_SWAP="true",
    )
    try:
        answers = asyncio.run(asyncio.wait_for(over_a_swap(p, url), patient(600)))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(patient(120))
    over = [(prompt, a) for prompt, a in answers if len(a["meta_info"]["weight_versions"]) > 1]
    assert over
    for prompt, answer in over:
        meta, sampled = answer["meta_info"], answer["output_ids"]
        assert [s["version"] for s in meta["weight_versions"]] == ["0", "1"]
        assert meta["num_retractions"] > 0
        whole = torch.tensor(prompt + sampled)
        out = p.model(whole, torch.arange(len(whole)), causal_rows(1, len(whole)))
        rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), "<i4").reshape(-1, *out.experts_NLK.shape[1:])
        assert np.array_equal(np.sort(rows, -1), out.experts_NLK[:-1].sort(-1).values.numpy())  # of all before, too
        now = (
            p.model.logits(out.hidden_ND)
            .log_softmax(-1)[len(prompt) - 1 : -1][torch.arange(len(sampled)), sampled]
            .numpy()
        )
        told = np.array([logprob for logprob, _, _ in meta["output_token_logprobs"]])
        at = meta["weight_versions"][1]["start"]
        assert np.abs(now - told)[at:].max() <= SAME  # as if all before had been the new version's
        assert np.abs(now - told)[:at].max() > SAME


async def over_a_swap(p: Platform, url: str) -> list[tuple[list[int], dict[str, Any]]]:
    """Whenever the update comes, somebody is in mid-generation."""
    there, answers = asyncio.Event(), []

    async def asking(new: int) -> None:
        while not there.is_set():
            prompt = [5, 6, new]
            status, answer = await ask(url, "/generate", body_of(prompt, new, **ASKED))
            assert status == 200
            answers.append((prompt, answer))

    p.write_version(1, 0)
    askers = [asyncio.create_task(asking(new)) for new in (240, 200, 160)]
    await computing((await ask(url, "/server_info"))[1]["url"], len(askers))
    await p.announce(1, 0)
    await p.applied(1)
    there.set()
    await asyncio.gather(*askers)
    await p.bus.close()
    return answers
