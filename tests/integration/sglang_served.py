"""A platform whose run the real SGLang serves, and what its drafts must have been."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch

from shared.model import Transformer, causal_rows
from tests.integration import engine_platform
from tests.integration.engine_platform import Platform, ask, body_of, start_process
from tests.patience import eventually, patient
from tests.sglang import interpreter

START_S = 900  # SGLang's imports alone take minutes on a machine that is busy


@dataclass(frozen=True)
class Served:
    """A platform whose run is served by SGLang, in a process of its own. `url`: of our service; `sglang`: of SGLang."""

    platform: Platform
    url: str
    process: subprocess.Popen[bytes]
    sglang: str

    def generate(self, prompt: list[int], new: int, **more: Any) -> dict[str, Any]:
        status, answer = asyncio.run(ask(self.url, "/generate", body_of(prompt, new, **more)))
        assert status == 200, answer
        return answer

    def all_at_once(self, prompts: list[list[int]], new: int, **more: Any) -> list[dict[str, Any]]:
        async def go() -> list[tuple[int, Any]]:
            return await asyncio.gather(*(ask(self.url, "/generate", body_of(p, new, **more)) for p in prompts))

        answers = asyncio.run(go())
        assert all(status == 200 for status, _ in answers), answers
        return [answer for _, answer in answers]

    def follow(self, serial: int, parent: int | None) -> Any:
        """Publishes a version; returns what the replica said of it."""
        p = self.platform
        p.write_version(serial, parent)

        async def go() -> Any:
            await p.announce(serial, -1 if parent is None else parent)
            return (await p.applied(serial))[0]

        return asyncio.run(asyncio.wait_for(go(), patient(600)))


async def computing(sglang: str, n: int) -> None:
    """Wait until the server itself says that it runs so many generations."""

    async def now() -> bool:
        return sum(x["num_running_reqs"] for x in (await ask(sglang, "/v1/loads"))[1]["loads"]) == n

    await eventually(now, f"{n} generations to run", 300)


@contextlib.contextmanager
def serving(platform: Platform, *, drafts: int) -> Iterator[Served]:
    """Skips where there is no SGLang. `drafts`: of the MTP layer, per step."""
    python = interpreter()
    platform.write_version(0, None)
    asyncio.run(platform.start_run())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_platform, "START_S", START_S)
        began = time.monotonic()
        process, url = start_process(
            platform,
            ETUDE_ENGINE="sglang",
            ETUDE_SGLANG_PYTHON=python,
            ETUDE_SGLANG_DEVICE="cpu",
            ETUDE_SGLANG_DTYPE="float32",
            ETUDE_SGLANG_DRAFT_STEPS=str(drafts),
        )
    print(f"{platform.model.config.model_type}: served after {time.monotonic() - began:.0f} s")
    behind = asyncio.run(ask(url, "/server_info"))[1]["url"]
    yield Served(platform, url, process, behind)
    mine = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=patient(120)) == 0
    assert not [child for child in mine if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    asyncio.run(platform.bus.close())


def hand_on(model: Transformer) -> None:
    """The MTP layer is made to hand on the last token's embedding, and the head to be the embedding, so that many drafts are
    accepted."""
    size, (mtp,) = model.config.hidden_size, model.mtp_layers
    mtp.eh_proj.weight.copy_(torch.eye(size, 2 * size))
    mtp.layer.load_state_dict(model.layers[-1].state_dict())
    if model.lm_head is not None:
        model.lm_head.weight.copy_(model.embed_tokens.weight)
        model.embed_tokens.weight.mul_(3)  # else random layers drown it


def greedy_passes(model: Transformer, prompt: list[int], sampled: list[int], *, drafts: int) -> int:
    """Passes that verify so many drafts each, for all but the first of the sampled tokens, at temperature 0. Drafts beyond the
    first are a chain: the MTP layer's own state takes the trunk's place, its own draft the token's."""
    whole = torch.tensor(prompt + sampled)
    positions = torch.arange(len(whole))
    residual_ND = model(whole, positions, causal_rows(1, len(whole))).residual_ND[:-1]
    kept: list[torch.Tensor] = []  # keys and values of the MTP layer, from the trunk's states

    def keeping(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        kept[:] = [k, v]
        return causal_rows(1, len(k))(layer, q, k, v)

    hidden_ND = model.mtp(residual_ND, whole[1:], positions[:-1], keeping)

    def chain(at: int) -> list[int]:
        """What is drafted for positions `at` + 1 and on, when `at` is the newest token's."""
        keys, values = (x[:at] for x in kept)
        state, found = hidden_ND[at - 1 : at], [int(model.mtp_logits(hidden_ND[at - 1 : at]).argmax())]

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            nonlocal keys, values
            keys, values = torch.cat([keys, k]), torch.cat([values, v])
            R = q.shape[1] // k.shape[1]
            all_k, all_v = keys.repeat_interleave(R, 1), values.repeat_interleave(R, 1)
            weights = torch.einsum("nhd,mhd->hnm", q, all_k).softmax(-1)
            return torch.einsum("hnm,mhd->nhd", weights, all_v)

        for i in range(1, drafts):
            embedded = model.embed_tokens(torch.tensor(found[-1:]))
            rotation = model.rotary(torch.tensor([at - 1 + i]))
            state = model.mtp_layers[0](model.config.num_hidden_layers, embedded, state, rotation, attend)
            found.append(int(model.mtp_logits(state).argmax()))
        return found

    at, passes = len(prompt), 0
    while at < len(whole) - 1:
        right = 0
        for draft in chain(at):
            if at + 1 + right >= len(whole) or draft != whole[at + 1 + right]:
                break
            right += 1
        at += 1 + right
        passes += 1
    return passes
