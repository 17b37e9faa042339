"""`etude start` against a platform that the settings name; here the embedded servers, without any service behind them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from etude.demo import DemoOptions
from etude.demo.prepare import DemoError, own_pack
from etude.start import announce
from shared import bus as buses
from shared import objects as stores
from shared.contracts import topics
from shared.contracts.run import RunConfig
from shared.problems.pack import read_problems
from shared.settings import ServiceSettings
from tests.end_to_end.problems import write
from tests.patience import patient


def test_a_started_run_is_one_message_whose_configuration_and_parts_are_all_in_the_store(tmp_path):
    settings = ServiceSettings(state=tmp_path)
    problems = tmp_path / "mine.jsonl"
    write(problems)

    async def scenario() -> tuple[str, RunConfig]:
        run = await announce(DemoOptions(problems=problems, minutes=3.0, seed=7), settings)
        bus = buses.connect(settings.bus_url, client="test")
        delivery = await anext(aiter(bus.deliveries([topics.RUNS_COMMANDS], None, 1)))
        message = delivery.message
        delivery.done()
        await bus.close()
        assert (message.run, message.action) == (run, "start")
        assert message.config
        data = stores.connect(settings.objects_url).get(message.config)
        return run, msgspec.json.decode(data, type=RunConfig)

    run, config = asyncio.run(asyncio.wait_for(scenario(), patient(60)))
    assert (config.run, config.seed, config.schedule.minutes) == (run, 7, 3.0)
    objects = stores.connect(settings.objects_url)
    for ref in (config.base, config.pack, config.pack_hidden, config.eval_pack, config.eval_pack_hidden):
        assert ref
        assert len(objects.get(ref)) == ref.size


def test_a_probe_goes_with_the_run_whose_problems_it_tried_and_with_no_other(tmp_path):
    settings = ServiceSettings(state=tmp_path / "state")
    problems, probe = tmp_path / "mine.jsonl", tmp_path / "probe.json"
    write(problems)
    practised, held_out = (
        [
            one.id
            for one in read_problems((own_pack(problems, tmp_path / "pack") / f"{split}.public.jsonl.zst").read_bytes())
        ]
        for split in ("rl", "held_out")
    )

    def announced(*names: str) -> RunConfig:
        tried = {name: {"attempts": 8, "solved": 3} for name in names}
        probe.write_bytes(msgspec.json.encode({"version": 1, "problems": tried}))
        run = asyncio.run(announce(DemoOptions(problems=problems, probe=probe), settings))
        objects = stores.connect(settings.objects_url)
        return msgspec.json.decode(objects.get(objects.head(f"runs/{run}/config.json")), type=RunConfig)

    config = announced(*practised[:3])
    assert config.probe is not None
    assert stores.connect(settings.objects_url).get(config.probe) == probe.read_bytes()
    with pytest.raises(DemoError, match=f"--probe .*found '{held_out[0]}'; allowed: ids of split rl"):
        announced(practised[0], held_out[0])


def test_problems_that_cannot_be_read_start_nothing(tmp_path):
    settings = ServiceSettings(state=tmp_path)
    with pytest.raises(DemoError, match=r"missing\.jsonl"):
        asyncio.run(announce(DemoOptions(problems=tmp_path / "missing.jsonl"), settings))
    assert not (tmp_path / "bus.db").exists()
