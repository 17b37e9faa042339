"""Weights from a folder on request (`/update_weights_from_disk`), as SGLang's clients ask for them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.inference.published import bits_of
from services.inference.service import Inference
from shared.model import ModelConfig, Transformer, load_checkpoint, save_checkpoint
from shared.weights import checksum
from tests.integration.engine_platform import CONFIG, RUN, Platform, ask, body_of, expected_logprobs, run
from tests.integration.sglang_world import World
from tests.patience import eventually

UPDATE = "/update_weights_from_disk"


async def ready(replica: Inference) -> str:
    await eventually(lambda: replica.health.ready)
    return replica.health.url


def write(folder: Path, *, seed: int = 7, **changes: Any) -> Transformer:
    """Another model in a folder of its own, as it is read again."""
    torch.manual_seed(seed)
    save_checkpoint(Transformer(ModelConfig.from_dict({**CONFIG, **changes})).requires_grad_(False), folder)
    return load_checkpoint(folder).requires_grad_(False)


def test_the_weights_of_a_folder_serve_verified_and_what_was_asked_before_goes_on(tmp_path):
    async def test(p: Platform) -> None:
        other, prompt = write(tmp_path / "other"), list(range(20))
        async with p.replica(checkpoint=p.base) as replica:
            url = await ready(replica)
            await ask(url, "/generate", body_of(prompt, 4))
            await ask(url, "/pause_generation", {"mode": "in_place"})
            running = asyncio.create_task(ask(url, "/generate", body_of([5, 6, 7], 12)))
            await eventually(lambda: replica.server.engine.waiting == 1)
            status, told = await ask(url, UPDATE, {"model_path": str(tmp_path / "other"), "load_format": "auto"})
            assert (status, told["success"], told["weight_version"]) == (200, True, "1")
            assert "version 1 samples" in told["message"]
            await ask(url, "/continue_generation", {})
            assert (await running)[1]["meta_info"]["weight_versions"] == [{"version": "1", "start": 0, "end": 12}]
            _, answer = await ask(url, "/generate", body_of(prompt, 8))
            meta = answer["meta_info"]
            assert (meta["cached_tokens"], meta["oldest_kv_version"], meta["weight_version"]) == (0, 1, "1")
            logprobs = np.array([p for p, _, _ in meta["output_token_logprobs"]])
            np.testing.assert_allclose(logprobs, expected_logprobs(other, prompt, answer["output_ids"]), atol=1e-5)
            checked = (await ask(url, "/weights_checker", {}))[1]
            assert (checked["serial"], checked["checksum"]) == (1, checksum(bits_of(other)))
            assert (await ask(url, "/model_info"))[1]["model_path"] == str(tmp_path / "other")
            back = {"model_path": str(p.base), "weight_version": "7"}
            assert (await ask(url, UPDATE, back))[1]["weight_version"] == "7"
            checked = (await ask(url, "/weights_checker", {}))[1]
            assert (checked["serial"], checked["checksum"]) == (7, checksum(bits_of(p.model)))

    run(test, tmp_path)


def test_what_is_kept_for_sessions_is_forgotten_unless_it_is_to_be_kept(tmp_path):
    async def test(p: Platform) -> None:
        asked = body_of(list(range(20)), 2, extra_key="mine")
        async with p.replica(checkpoint=p.base) as replica:
            url = await ready(replica)
            for flush, cached in ({"flush_cache": False}, 19), ({}, 0):  # SGLang, too, flushes unless it is told not to
                await ask(url, "/generate", asked)
                assert (await ask(url, UPDATE, {"model_path": str(p.base), **flush}))[0] == 200
                assert (await ask(url, "/generate", asked))[1]["meta_info"]["cached_tokens"] == cached

    run(test, tmp_path)


def spoil(folder: Path, **changed: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in changed.items():
        tensors.pop(name)
        tensors |= {} if tensor is None else {name: tensor}
    save_file(tensors, folder / "model.safetensors")


def test_nothing_of_a_folder_that_does_not_fit_is_loaded(tmp_path):
    async def test(p: Platform) -> None:
        write(tmp_path / "fits")
        write(tmp_path / "wide", hidden_size=64)
        write(tmp_path / "far", rope_theta=1e6)
        for name, changed in {"lacks": None, "shape": torch.zeros(3)}.items():
            write(tmp_path / name)
            spoil(tmp_path / name, **{"model.norm.weight": changed})
        write(tmp_path / "cut")
        whole = (tmp_path / "cut" / "model.safetensors").read_bytes()
        (tmp_path / "cut" / "model.safetensors").write_bytes(whole[:-100])
        refused = {
            "nowhere": "no config.json",
            "wide": "hidden_size: found 64; allowed: 32",
            "far": "rope: found",
            "lacks": "'model.norm.weight'",
            "shape": "model.norm.weight is (3,)",
            "cut": "not a readable safetensors file",
        }
        async with p.replica(checkpoint=p.base) as replica:
            url = await ready(replica)
            for name, said in refused.items():
                status, told = await ask(url, UPDATE, {"model_path": str(tmp_path / name)})
                assert (status, told["success"]) == (400, False), name
                assert said in told["message"], told
                assert told["error"]["message"] == told["message"]
            for more, said in {
                ("weight_version", "step-3"): "weight_version: found 'step-3'; allowed: a whole number, 1..",
                ("weight_version", "0"): "weight_version: found '0'; allowed: a whole number, 1..",
                ("keep_pause", True): "keep_pause: found True; allowed: False",
            }.items():
                body = {"model_path": str(tmp_path / "fits"), **dict([more])}
                status, told = await ask(url, UPDATE, body)
                assert (status, told["success"], said in told["message"]) == (400, False, True), told
            checked = (await ask(url, "/weights_checker", {}))[1]
            assert (checked["serial"], checked["checksum"]) == (0, checksum(bits_of(p.model)))

    run(test, tmp_path)


def test_an_mtp_layer_that_the_folder_lacks_stays(tmp_path):
    async def test(p: Platform) -> None:
        other = bits_of(write(tmp_path / "other"))
        mtp = [name for name in other if name.startswith("model.layers.2.")]
        spoil(tmp_path / "other", **dict.fromkeys(mtp))
        async with p.replica(checkpoint=p.base) as replica:
            url = await ready(replica)
            assert (await ask(url, UPDATE, {"model_path": str(tmp_path / "other")}))[0] == 200
            mine = bits_of(p.model)
            assert mtp
            expected = checksum({**other, **{name: mine[name] for name in mtp}})
            assert (await ask(url, "/weights_checker", {}))[1]["checksum"] == expected

    run(test, tmp_path)


@pytest.mark.parametrize("checkpoint", [False, True], ids=["followed", "stood_for"])
def test_a_replica_that_a_run_counts_on_takes_no_weights_from_elsewhere(tmp_path, checkpoint):
    async def test(p: Platform) -> None:
        p.write_version(0, None)
        await p.start_run()
        write(tmp_path / "other")
        async with p.replica(**({"checkpoint": p.base} if checkpoint else {})) as replica:
            await p.applied(0)
            url = replica.health.url
            status, told = await ask(url, UPDATE, {"model_path": str(tmp_path / "other")})
            assert (status, told["success"]) == (409, False)
            assert RUN in told["message"]
            assert ("ETUDE_STATE" if checkpoint else "ETUDE_CHECKPOINT") in told["message"]
            assert (await ask(url, "/weights_checker", {}))[1]["checksum"] == checksum(bits_of(p.model))

    run(test, tmp_path)


def test_a_replica_that_was_given_weights_is_taken_for_no_runs_policy(tmp_path):
    async def test(p: Platform) -> None:
        write(tmp_path / "other")
        async with p.replica(checkpoint=p.base) as replica:
            url = await ready(replica)
            assert (await ask(url, UPDATE, {"model_path": str(tmp_path / "other")}))[0] == 200
            await p.start_run()
            await eventually(lambda: RUN in replica.agent.following.started)
            assert (await ask(url, UPDATE, {"model_path": str(p.base)}))[0] == 200
            assert replica.agent.run_id == ""
            assert (await ask(url, "/model_info"))[1]["serial"] == 2

    run(test, tmp_path)


def test_sglang_takes_them_by_the_way_that_versions_take(tmp_path, monkeypatch):
    async def test(p: Platform) -> None:
        world, other = World(p, monkeypatch), write(tmp_path / "other")
        async with world.replica(checkpoint=p.base) as replica:
            url = await ready(replica)
            status, told = await ask(url, UPDATE, {"model_path": str(tmp_path / "other"), "flush_cache": True})
            assert (status, told["success"]) == (400, False)
            assert "flush_cache: found True; allowed: False, as ETUDE_FLUSH_ON_SWAP says" in told["message"]
            status, told = await ask(url, UPDATE, {"model_path": str(tmp_path / "other")})
            assert (status, told["success"], told["weight_version"]) == (200, True, "1")
            checked = (await ask(url, "/weights_checker", {}))[1]
            assert (checked["serial"], checked["checksum"]) == (1, checksum(bits_of(other)))

    run(test, tmp_path)


def test_openais_clients_find_the_model_that_is_served(tmp_path):
    async def test(p: Platform) -> None:
        async with p.replica(checkpoint=p.base) as replica:
            url = await ready(replica)
            status, listed = await ask(url, "/v1/models")
            assert status == 200, json.dumps(listed)
            (model,) = listed["data"]
            assert (listed["object"], model["object"], model["id"]) == ("list", "model", str(p.base))
            assert (model["max_model_len"], type(model["created"])) == (64, int)
        async with p.replica() as replica:
            assert (await ask(replica.health.url, "/v1/models"))[0] == 503
            await p.start_run()
            await p.applied(0)
            assert (await ask(replica.health.url, "/v1/models"))[1]["data"][0]["id"] == RUN

    run(test, tmp_path)
