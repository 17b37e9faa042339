"""The engine with more than it can do: long prompts, full queues, steps that fail, weights that are no numbers."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from services.inference import metrics
from services.inference.engine import MOST_FAILED, Engine, Overloaded
from tests.patience import patient
from tests.unit.inference.test_engine_equals_model import (
    DEEPSEEK,
    QWEN3_MOE,
    Asked,
    build,
    check,
    engine_of,
)

__all__ = ["engine_of"]


def test_a_long_prompt_delays_those_that_sample_by_one_chunk_at_a_time(engine_of) -> None:
    engine = engine_of(build(), prefill_tokens=16)
    long: list[Asked] = []
    computed: list[int] = []  # of the long prompt, whenever the other one gets a token

    def progress(_token: int, _logprob: float, _serial: int) -> None:
        if long:
            computed.append(long[0].request.computed)
        else:  # on the engine's thread, in a step: what is asked here begins with the next
            long.append(Asked(engine, np.arange(80) % 64, 4))

    Asked(engine, np.array([1, 2, 3]), 20, progress=progress).result()
    assert computed[:6] == [16, 32, 48, 64, 80, 80]
    check(engine.model, long[0], long[0].result())


def test_what_arrives_while_a_step_is_under_way_counts_towards_the_limit_of_those_that_wait(engine_of) -> None:
    engine = engine_of(build(), rows=3, queue_limit=2)
    begun, told = threading.Event(), threading.Event()
    running = Asked(engine, np.arange(10), 20, progress=lambda *_: begun.set() or told.wait(patient(30)))
    assert begun.wait(patient(30))
    taken = [Asked(engine, np.arange(i, i + 9), 3) for i in range(4)]  # two of them find a row after this step
    with pytest.raises(Overloaded, match="4 requests wait; the limit is 2"):
        Asked(engine, np.arange(9), 3)
    assert engine.state()["waiting"] == 4
    told.set()
    for one in (running, *taken):
        assert one.result().finish.type == "length"
    assert engine.call(engine.state).result()["waiting"] == 0
    Asked(engine, np.arange(9), 3).result()


def test_an_engine_whose_every_step_fails_ends_and_says_why(monkeypatch) -> None:
    told: list[str] = []
    engine = Engine(
        build(), 0, rows=4, positions=96, prefill_tokens=16, queue_limit=10, failed=lambda why: told.append(why)
    )
    engine.start()

    def lost() -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine.batch, "step", lost)
    for i in range(MOST_FAILED - 1):  # a step that goes through between them, and they are counted anew
        assert Asked(engine, np.arange(i, i + 9), 3).result().finish.type == "abort"
    monkeypatch.undo()
    assert Asked(engine, np.arange(9), 3).result().finish.type == "length"
    monkeypatch.setattr(engine.batch, "step", lost)
    for i in range(MOST_FAILED):
        assert engine.alive
        assert not told, i
        result = Asked(engine, np.arange(i, i + 9), 3).result()
        assert "the engine failed: RuntimeError: the device is lost" in result.finish.message
    engine._thread.join(patient(30))
    assert not engine.alive
    (why,) = told
    assert why == f"{MOST_FAILED} steps failed one after the other, the last by RuntimeError: the device is lost"
    with pytest.raises(Overloaded, match="the device is lost"):
        Asked(engine, np.arange(9), 3)


def test_one_request_that_breaks_every_step_does_not_end_the_engine_however_often_it_is_asked_again(
    engine_of, monkeypatch
) -> None:
    model = build()
    engine = engine_of(model)
    step = engine.batch.step

    def breaks() -> None:
        if any(prompt == poison.tobytes() for prompt in engine.batch.prompts()):
            raise RuntimeError("no memory for this one")
        step()

    poison = np.arange(9, dtype=np.int32)
    monkeypatch.setattr(engine.batch, "step", breaks)
    for _ in range(2 * MOST_FAILED):
        assert Asked(engine, poison, 3).result().finish.type == "abort"
    other = Asked(engine, np.arange(1, 10), 3)
    check(model, other, other.result())


def test_a_request_for_which_there_is_no_memory_is_told_so_and_those_behind_it_are_not_forgotten(
    engine_of, monkeypatch
) -> None:
    model = build()
    engine = engine_of(model)
    take, first = engine.batch.cache.take, [True]

    def no_memory(*of: object) -> object:
        if first:
            first.clear()
            raise RuntimeError("no memory for a row")
        return take(*of)

    monkeypatch.setattr(engine.batch.cache, "take", no_memory)
    engine.pause(abort=False).result()
    asked = [Asked(engine, np.arange(i, i + 9), 3) for i in range(3)]
    engine.proceed().result()
    for one in asked:
        assert "no memory for a row" in one.result().finish.message
    later = Asked(engine, np.arange(9), 3)
    check(model, later, later.result())


def test_an_engine_that_cannot_even_tell_those_who_wait_says_why_it_ends(monkeypatch) -> None:
    over: Future[str] = Future()
    engine = Engine(build(), 0, rows=4, positions=96, prefill_tokens=16, queue_limit=10, failed=over.set_result)
    engine.start()

    def lost(*_: str) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine.batch, "step", lost)
    monkeypatch.setattr(engine.batch, "abort_all", lost)
    Asked(engine, np.arange(9), 3)
    assert over.result(30) == "RuntimeError: the device is lost"
    assert not engine.alive


@pytest.mark.parametrize("ends", ["length", "abort"])
@pytest.mark.parametrize("config", [DEEPSEEK, QWEN3_MOE], ids=["in_torch", "compiled"])
def test_weights_that_are_no_numbers_leave_nothing_behind_for_later_sessions(config, ends, engine_of) -> None:
    good, bad = build(config), build(config)
    bad.layers[0].input_layernorm.weight.fill_(torch.nan)
    engine = engine_of(good, rows=2)
    engine.swap(bad, 1).result()
    if ends == "length":  # both rows, nearly whole
        spoilt = [Asked(engine, np.arange(i, i + 20), 60, extra_key="1") for i in range(2)]
        assert all(np.isnan(one.result().logprobs_C).all() for one in spoilt)
    else:  # one in mid-prompt: nothing was sampled that could tell
        engine.pause(abort=False).result()
        spoilt = [Asked(engine, np.arange(i, i + 80) % 64, 17, extra_key="1") for i in range(2)]
        engine.call(lambda: [(engine.batch.admit(), engine.batch.step()) for _ in range(9)]).result()
        for one in spoilt:
            engine.abort(one.request, "test")
        engine.proceed().result()
        assert [len(one.result().tokens_C) for one in spoilt] == [5, 0]
    engine.swap(good, 2).result()
    turns = [Asked(engine, np.arange(n), 20, extra_key="2") for n in (60, 5)]  # the short one reads far beyond its end
    for turn in turns:
        check(good, turn, turn.result())


def test_what_is_kept_for_the_next_turn_counts_as_room_and_each_answer_tells_how_long_it_took(engine_of) -> None:
    engine = engine_of(build(), rows=4)
    begun, told = threading.Event(), threading.Event()

    def counts() -> tuple[float, ...]:
        samples = {
            s.name: s.value for h in (metrics.FIRST_TOKEN, metrics.BETWEEN_TOKENS) for s in h.collect()[0].samples
        }
        names = ("time_to_first_token", "inter_token_latency")
        return tuple(samples[f"sglang:{name}_seconds_count"] for name in names)

    before = counts()
    asked = Asked(engine, np.arange(40), 8, progress=lambda *_: begun.set() or told.wait(patient(30)))
    assert begun.wait(patient(30))
    assert engine.state()["token_usage"] == 40 / (4 * 96)
    told.set()
    asked.result()
    assert engine.call(engine.state).result()["token_usage"] == 0
    assert Asked(engine, np.arange(45), 1).result().cached_tokens > 0  # it is there all the same
    assert tuple(b - a for a, b in zip(before, counts(), strict=True)) == (2, 1)  # of one token there is no between
