"""The embedded engine in FP8 and in bfloat16: what it says that it serves, and what it computes with."""

from __future__ import annotations

import numpy as np

from shared.model import published
from shared.model.fp8 import round_inputs, round_weights
from shared.weights import read_manifest
from tests.integration.engine_platform import Platform, ask, body_of, expected_logprobs, run


def test_versions_are_followed_in_fp8_and_the_checksum_is_the_published_ones(tmp_path):
    async def test(p: Platform) -> None:
        p.write_version(0, None)
        async with p.replica(fp8=True) as replica:
            url = replica.health.url
            await p.start_run()
            await p.applied(0)
            for serial in (1, 2):
                p.write_version(serial, serial - 1)
                await p.announce(serial, serial - 1)
                await p.applied(serial)
            checked = (await ask(url, "/weights_checker", {"action": "checksum"}))[1]
            assert checked["serial"] == 2
            assert checked["checksum"] == read_manifest(p.objects, p.versions[2].manifest).checksum
            prompt = list(range(20))
            # A seed: engine and model sum in another order, and an input that lies on the edge between two values of FP8 may be
            # rounded to either. One such edge moves a log-probability by about 0.01; these eight tokens meet none.
            _, answer = await ask(url, "/generate", body_of(prompt, 8, sampling={"sampling_seed": 3}))
            sampled = np.array([p for p, _, _ in answer["meta_info"]["output_token_logprobs"]])
            plain = expected_logprobs(p.model, prompt, answer["output_ids"])
            with published(p.model):
                round_weights(p.model)
                end = round_inputs(p.model)
                in_fp8 = expected_logprobs(p.model, prompt, answer["output_ids"])
                end()
            np.testing.assert_allclose(sampled, in_fp8, atol=1e-3)
            assert np.abs(sampled - plain).max() > 1e-3

    run(test, tmp_path)


def test_versions_are_followed_in_bfloat16_bit_for_bit(tmp_path):
    async def test(p: Platform) -> None:
        p.write_version(0, None)
        async with p.replica(engine_dtype="bfloat16", engine_threads=2) as replica:
            url = replica.health.url
            await p.start_run()
            await p.applied(0)
            p.write_version(1, 0)
            await p.announce(1, 0)
            await p.applied(1)
            checked = (await ask(url, "/weights_checker", {"action": "checksum"}))[1]
            assert (checked["serial"], checked["checksum"]) == (
                1,
                read_manifest(p.objects, p.versions[1].manifest).checksum,
            )
            assert (await ask(url, "/generate", body_of(list(range(20)), 8)))[0] == 200

    run(test, tmp_path)
