"""What keeps a replica with SGLang from the run or version that it should serve, and what goes on meanwhile, over a stand-in
for the server."""

from __future__ import annotations

from typing import Any

from services.inference.candidates import FAILURES_TOLERATED
from shared.contracts.ids import policy_prefix
from shared.contracts.topics import RUNS_STATE
from tests.integration.engine_platform import RUN, Store, another_base, ask, body_of
from tests.integration.sglang_world import World, quick, world
from tests.patience import eventually
from tests.ruling import status

__all__ = ["quick", "world"]
DEEPSEEK = {  # without YaRN, which SGLang does not compute on a CPU
    "model_type": "deepseek_v3",
    "intermediate_size": 48,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
}


async def goes_on(w: World, replica: Any, pid: int) -> None:
    assert (await ask(replica.health.url, "/readyz"))[0] == 200
    assert (await ask(replica.health.url, "/generate", body_of([1, 2], 2)))[0] == 200
    assert (replica.agent.run_id, (await w.server(replica))["pid"]) == (RUN, pid)


def test_a_run_that_the_settings_do_not_go_with_ends_no_server_that_serves_another(world):
    async def test(w: World) -> None:
        await w.p.start_run()
        async with w.replica() as replica:
            await w.p.applied(0)
            pid = (await w.server(replica))["pid"]
            await w.p.start_run("r-other", another_base(w.p.state / "other", **DEEPSEEK))
            unread = replica.agent.candidates.unread
            await eventually(lambda: "r-other" in unread and unread["r-other"].failures > FAILURES_TOLERATED)
            assert "sglang_device: found 'cpu'; allowed: 'cuda'" in unread["r-other"].what
            await goes_on(w, replica, pid)

    world(test)


def test_a_run_that_the_disk_has_no_room_for_ends_no_server_that_serves_another(world, monkeypatch):
    async def test(w: World) -> None:
        await w.p.start_run()
        async with w.replica() as replica:
            await w.p.applied(0)
            pid = (await w.server(replica))["pid"]
            monkeypatch.setattr("services.inference.sglang.place.Place.room", lambda _: 1000)
            await w.p.start_run("r-large")
            unread = replica.agent.candidates.unread
            await eventually(lambda: "r-large" in unread and unread["r-large"].failures > FAILURES_TOLERATED)
            assert "sglang_weights: found 0.0 GiB for versions at" in unread["r-large"].what
            await goes_on(w, replica, pid)

    world(test)


def test_a_run_that_no_server_comes_up_with_gives_the_replica_back_until_it_is_started_anew(world):
    async def test(w: World) -> None:
        await w.p.start_run()
        async with w.replica() as replica:
            url = replica.health.url
            _, seen = await w.p.applied(0)
            w.wrong(no_room=96)
            await w.p.start_run("r-large", another_base(w.p.state / "large", vocab_size=96))
            message, seen = await w.p.applied(0, after=seen)
            assert message.run == RUN
            candidates = replica.agent.candidates
            assert "SGLang did not start, 3 times: ended with exit code 1" in candidates.unread["r-large"].what
            assert candidates.due(RUN) is None  # no try would leave what serves alone
            await goes_on(w, replica, (pid := (await w.server(replica))["pid"]))
            w.p.write_version(0, None)
            w.p.write_version(1, 0)
            await w.p.announce(1, 0)
            message, seen = await w.p.applied(1, after=seen)
            assert (await w.server(replica))["pid"] == pid
            assert (await ask(url, "/pin", {"serial": 0}))[0] == 200
            assert (await ask(url, "/pin", {"serial": -1}))[0] == 200
            w.wrong()
            await w.p.bus.publish(RUNS_STATE, "r-large", status("r-large", "running"))
            await eventually(lambda: replica.agent.run_id == "r-large")
            await w.ready(replica)

    world(test)


def test_a_later_run_is_served_though_no_server_comes_up_with_the_one_before(world):
    async def test(w: World) -> None:
        w.wrong(no_room=96)
        await w.p.start_run("r-large", another_base(w.p.state / "large", vocab_size=96))
        async with w.replica() as replica:
            await w.waits(replica, "ended with exit code 1 while it started: RuntimeError: not enough memory")
            assert (await ask(replica.health.url, "/pin", {"serial": 0}))[0] == 400  # at once: nothing is served
            await w.p.start_run()
            message, _ = await w.p.applied(0)
            assert message.run == RUN
            await w.ready(replica)

    world(test)


def test_a_disk_that_takes_no_version_is_said_and_then_the_delta_alone_is_fetched(world):
    async def test(w: World) -> None:
        store = Store(w.p.objects)
        w.p.write_version(0, None)
        await w.p.start_run()
        async with w.replica(objects=store) as replica:
            _, seen = await w.p.applied(0)
            w.p.write_version(1, 0)
            in_the_way = w.p.state / "sglang" / "replica" / "1" / ".1"
            in_the_way.write_text("no folder can be made here")
            await w.p.announce(1, 0)
            message, seen = await w.p.applied(1, ok=False, after=seen)
            assert "File exists" in message.reason
            assert (await ask(replica.health.url, "/generate", body_of([1, 2], 2)))[0] == 200
            in_the_way.unlink()
            await w.p.applied(1, after=seen)
            await w.ready(replica)
            assert set(store.payloads()) == {f"{policy_prefix(RUN, 1)}/0000-0000.bin"}

    world(test)


def test_a_checkpoint_that_no_server_comes_up_with_is_tried_again_for_as_long_as_it_takes(world):
    async def test(w: World) -> None:
        w.wrong(exit="ValueError: the device is taken")
        async with w.replica(checkpoint=w.p.base) as replica:
            await eventually(lambda: replica.engine._starts > 1)  # of engines: each has tried several servers
            await w.waits(replica, "ended with exit code 1 while it started: ValueError: the device is taken")
            w.wrong()
            await w.ready(replica)
            assert (await ask(replica.health.url, "/generate", body_of([1, 2], 2)))[0] == 200

    world(test)
