"""What a replica refuses to serve, and how it says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from safetensors.torch import load_file, save_file

from services.inference.config import InferenceSettings
from shared.settings import REFUSED
from tests.integration.engine_platform import Platform, ask, body_of, run
from tests.patience import eventually, patient


def spoil(directory: Path, how: str) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    if how == "tensor":
        tensors.pop("model.norm.weight")
        save_file(tensors, path)
    elif how == "dtype":
        save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"].double()}, path)
    elif how == "config":
        (directory / "config.json").unlink()
    elif how == "model":
        (directory / "config.json").write_text('{"model_type": "unheard_of"}')
    else:
        (directory / "etude.json").write_text('{"context": "512"}')


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("tensor", "1 tensors are missing, the first is 'model.norm.weight'"),
        ("dtype", "model.norm.weight is float64; allowed: BF16, F16, F32"),
        ("config", "no config.json"),
        ("model", "unheard_of"),
        ("card", "etude.json: context: found '512'; allowed: a whole number from 1"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_ends_the_process_with_its_reason_and_no_trace(
    tmp_path: Path, how: str, said: str
) -> None:
    platform = Platform(tmp_path)
    spoil(platform.base, how)
    env = {**os.environ, "ETUDE_STATE": str(tmp_path), "ETUDE_CHECKPOINT": str(platform.base), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "services.inference"], env=env, capture_output=True, text=True, timeout=patient(180)
    )
    assert done.returncode == REFUSED  # who supervises it does not start it again
    assert "Traceback" not in done.stderr, done.stderr
    assert "setting checkpoint: " in done.stderr
    assert said in done.stderr


def test_a_run_whose_base_lacks_a_tensor_takes_no_replica_from_one_that_can_be_served(tmp_path, monkeypatch):
    monkeypatch.setattr("services.inference.candidates.FIRST_DELAY_S", 0.05)

    async def test(p: Platform) -> None:
        p.write_version(0, None)
        await p.start_run()
        async with p.replica() as replica:
            await p.applied(0)
            spoil(p.base, "tensor")
            await p.start_run("r-lacking")
            await eventually(lambda: "r-lacking" in replica.agent.candidates.unread)
            assert replica.agent.run_id != "r-lacking"
            assert (await ask(replica.health.url, "/readyz"))[0] == 200
            assert (await ask(replica.health.url, "/generate", body_of([1, 2], 2)))[0] == 200

    run(test, tmp_path)


def test_a_body_that_is_no_json_names_what_is_wrong(tmp_path):
    async def test(p: Platform) -> None:
        await p.start_run()
        async with p.replica() as replica, aiohttp.ClientSession() as session:
            await p.applied(0)
            for path in ("/generate", "/v1/chat/completions", "/abort_request", "/pause_generation", "/pin"):
                for body in (b"{", b"\xff", b"[]", b"null", b"3", b"{}" * 2, b'{"a":' * 100_000):
                    async with session.post(replica.health.url + path, data=body) as answer:
                        assert answer.status == 400, (path, body[:20], await answer.text())
                        assert (await answer.json())["error"]["message"]
            for body in (b'{"input_ids": [1], "sampling_params": 3}', b'{"input_ids": ["a"]}'):
                async with session.post(f"{replica.health.url}/generate", data=body) as answer:
                    assert answer.status == 400
                    assert "sampling_params" in (text := await answer.text()) or "input_ids" in text

    run(test, tmp_path)


def test_a_page_of_another_site_moves_nothing(tmp_path):
    async def test(p: Platform) -> None:
        await p.start_run()
        async with p.replica() as replica, aiohttp.ClientSession() as session:
            await p.applied(0)
            own = replica.health.url
            for headers in ({"Origin": "https://evil.test"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
                for path in ("/pause_generation", "/abort_request", "/continue_generation", "/pin", "/generate"):
                    plain = {"Content-Type": "text/plain", **headers}
                    async with session.post(own + path, data=b'{"abort_all": true}', headers=plain) as answer:
                        assert answer.status == 403, (path, headers)
                        assert "another site" in (await answer.json())["error"]["message"]
            assert (await ask(own, "/server_info"))[1]["paused"] is False
            async with session.post(
                f"{own}/pause_generation", json={"mode": "in_place"}, headers={"Origin": own}
            ) as answer:
                assert answer.status == 200
            assert (await ask(own, "/server_info"))[1]["paused"] is True

    run(test, tmp_path)


def test_flushing_at_a_swap_is_refused_for_the_embedded_engine_with_who_can(tmp_path):
    with pytest.raises(ValueError, match="flush_on_swap: found true; allowed: false with engine 'embedded'"):
        InferenceSettings(state=tmp_path, flush_on_swap=True)
    assert InferenceSettings(state=tmp_path, flush_on_swap=True, engine="sglang").flush_on_swap
