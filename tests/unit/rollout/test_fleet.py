from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engine_client import retry_after_s
from services.rollout.fleet import (
    FIRST_REST_S,
    LAST_REST_S,
    OPEN_AFTER,
    SILENT_S,
    TRIAL_S,
    Circuit,
    Fleet,
    Wanted,
)
from shared.contracts.messages import GONE_S, MUTE_S, PolicyApplied


def fleet(*replicas: tuple[str, str, int]) -> Fleet:
    """(name, pool, serial), all alive."""
    made = Fleet()
    for name, pool, serial in replicas:
        made.apply(PolicyApplied(run="r", replica=name, url=f"http://{name}", pool=pool, serial=serial))  # type: ignore[arg-type]
        made.replicas[name].alive = True
    return made


def chosen(made: Fleet, wanted: Wanted, stay: str = "") -> str | None:
    replica = made.choose(wanted, 0.0, stay)
    return replica.name if replica else None


def test_a_group_stays_together_and_groups_spread() -> None:
    made = fleet(("a", "rollout", 1), ("b", "rollout", 1), ("c", "rollout", 1))
    choices = {f"g{i}": chosen(made, Wanted("r", f"g{i}", 0)) for i in range(60)}
    assert set(choices.values()) == {"a", "b", "c"}
    assert all(chosen(made, Wanted("r", group, 0)) == name for group, name in choices.items())


@given(st.sets(st.sampled_from("abcdef"), min_size=2), st.integers(0, 999))
def test_losing_a_replica_moves_only_its_own_groups(names: set[str], group: int) -> None:
    made = fleet(*((name, "rollout", 1) for name in names))
    wanted = Wanted("r", f"g{group}", 0)
    before = chosen(made, wanted)
    lost = next(name for name in sorted(names) if name != before)
    made.replicas[lost].alive = False
    assert chosen(made, wanted) == before


def test_a_replica_below_the_floor_or_of_another_run_or_out_of_rotation_serves_nothing() -> None:
    made = fleet(("a", "rollout", 3))
    assert chosen(made, Wanted("r", "g", 4)) is None
    assert chosen(made, Wanted("other", "g", 0)) is None
    made.apply(PolicyApplied(run="r", replica="a", url="http://a", serial=4, ok=False, reason="damaged"))
    assert chosen(made, Wanted("r", "g", 0)) is None
    made.apply(PolicyApplied(run="r", replica="a", url="http://a", serial=4))
    assert chosen(made, Wanted("r", "g", 4)) == "a"


def test_where_no_replica_is_in_rotation_one_that_still_holds_a_version_serves_what_accepts_it() -> None:
    made = fleet(("a", "rollout", 3), ("b", "rollout", 3))

    def word(name: str, **said: Any) -> None:
        made.apply(PolicyApplied(run="r", replica=name, url=f"http://{name}", **said))

    word("a", serial=4, ok=False, damaged=True, serving=3)
    assert {chosen(made, Wanted("r", f"g{i}", 3)) for i in range(20)} == {"b"}
    word("b", serial=4, ok=False, damaged=True, serving=3)
    assert {chosen(made, Wanted("r", f"g{i}", 3)) for i in range(20)} == {"a", "b"}
    assert chosen(made, Wanted("r", "g", 4)) is None
    assert made.any_usable(0.0)
    word("b", serial=5)
    assert {chosen(made, Wanted("r", f"g{i}", 3)) for i in range(20)} == {"b"}
    word("b", serial=5, ok=False, reason="shutting down")
    assert {chosen(made, Wanted("r", f"g{i}", 3)) for i in range(20)} == {"a"}


def test_one_that_a_worker_first_hears_of_out_of_rotation_serves_what_it_holds_not_what_it_could_not_load() -> None:
    made = Fleet()
    made.apply(PolicyApplied(run="r", replica="a", url="http://a", serial=4, ok=False, damaged=True, serving=3))
    made.replicas["a"].alive = True
    assert chosen(made, Wanted("r", "g", 4)) is None
    assert chosen(made, Wanted("r", "g", 3)) == "a"


def test_a_pinned_attempt_goes_to_the_evaluation_pool_else_to_whoever_serves_exactly_that_version() -> None:
    made = fleet(("roll", "rollout", 3), ("eval", "evaluation", 3), ("new", "rollout", 4))
    assert chosen(made, Wanted("r", "g", 3, pinned=3)) == "eval"
    assert {chosen(made, Wanted("r", f"g{i}", 3, pinned=3, spare=True)) for i in range(20)} == {"roll", "eval"}
    made.replicas["eval"].alive = False
    assert chosen(made, Wanted("r", "g", 3, pinned=3)) == "roll"
    assert chosen(made, Wanted("r", "g", 5, pinned=5)) is None


def test_training_never_uses_the_evaluation_pool() -> None:
    assert chosen(fleet(("eval", "evaluation", 3)), Wanted("r", "g", 0)) is None


def test_no_attempt_goes_to_an_engine_that_serves_others() -> None:
    made = Fleet()
    word = PolicyApplied(run="r", replica="serves", url="http://serves", pool="rollout", serial=3)
    made.apply(word)
    made.apply(msgspec.structs.replace(word, pool="serving"))
    assert not made.replicas
    for wanted in (Wanted("r", "g", 0), Wanted("r", "g", 3, pinned=3), Wanted("r", "g", 3, pinned=3, spare=True)):
        assert chosen(made, wanted) is None


def test_a_session_stays_with_its_kv() -> None:
    made = fleet(("a", "rollout", 1), ("b", "rollout", 1))
    other = {"a": "b", "b": "a"}
    first = chosen(made, Wanted("r", "g", 0))
    assert first is not None
    assert chosen(made, Wanted("r", "g", 0), stay=other[first]) == other[first]


def test_a_replica_started_again_at_the_same_address_replaces_the_old_one() -> None:
    made = fleet(("a", "rollout", 1))
    made.apply(PolicyApplied(run="r", replica="a2", url="http://a", serial=1))
    assert list(made.replicas) == ["a2"]


def test_a_replica_that_talks_is_not_probed_and_a_dead_one_ever_more_rarely() -> None:
    made = fleet(("a", "rollout", 1))
    replica = made.replicas["a"]
    replica.last_answer = 10.0
    assert not made.to_probe(10.2, silent_s=0.3)
    assert made.to_probe(10.3, silent_s=0.3) == [replica]
    replica.probe.running = True
    assert not made.to_probe(11.0, silent_s=0.3)
    now, rests = 11.0, []
    for _ in range(4):
        replica.probe.answered(False, now)
        rests.append(replica.probe.after - now)
        now = replica.probe.after
        assert made.to_probe(now, silent_s=0.3) == [replica]
    assert rests == [0.5, 1.0, 2.0, 2.0]


def test_a_circuit_opens_after_repeated_failures_and_one_outage_counts_once() -> None:
    circuit, now = Circuit(), 10.0
    for _ in range(OPEN_AFTER - 1):
        circuit.failed(now)
    assert circuit.allows(now)
    for _ in range(50):  # all requests in flight fail together
        circuit.failed(now)
    assert not circuit.allows(now + FIRST_REST_S * 0.99)
    assert circuit.allows(now + FIRST_REST_S)
    for _ in range(10):
        now = circuit.rest_until
        circuit.failed(now)
    assert circuit.rest_until - now == LAST_REST_S
    circuit.succeeded()
    assert circuit.allows(now)


def test_after_a_rest_one_request_tries_and_the_others_wait_for_it() -> None:
    circuit, now = Circuit(), 10.0
    for _ in range(OPEN_AFTER):
        circuit.sent(now)
        circuit.failed(now)
    now = circuit.rest_until
    assert circuit.allows(now)
    circuit.sent(now)
    assert not circuit.allows(now)
    assert not circuit.allows(now + TRIAL_S * 0.99)
    circuit.failed(now + 0.1)  # the one that tried: the rest is twice as long
    assert circuit.rest_until == now + 0.1 + 2 * FIRST_REST_S
    now = circuit.rest_until
    circuit.sent(now)
    assert circuit.allows(now + TRIAL_S)  # it takes its time: another one may follow
    circuit.succeeded()
    circuit.sent(now)
    assert circuit.allows(now)


def test_a_saturated_replica_is_passed_over_until_it_may_be_asked_again_unless_all_are() -> None:
    made, wanted = fleet(("a", "rollout", 1), ("b", "rollout", 1)), Wanted("r", "g", 0)
    first = chosen(made, wanted)
    assert first is not None
    other = {"a": "b", "b": "a"}[first]
    made.replicas[first].saturated_until = 5.0
    assert chosen(made, wanted, stay=first) == other
    assert made.any_usable(0.0)
    made.replicas[other].saturated_until = 5.0
    assert chosen(made, wanted) == first
    assert chosen(made, wanted, stay=other) == other
    assert made.any_usable(0.0)  # overload is no outage
    back = made.choose(wanted, 5.0)
    assert back is not None
    assert back.name == first


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("2", 2.0),
        ("0", 0.1),
        ("0.5", 0.5),
        ("", 1.0),
        ("-1", 1.0),
        ("nan", 1.0),
        ("inf", 30.0),
        ("9999", 30.0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 1.0),
    ],
)
def test_a_retry_after_is_read_within_bounds(header: str, seconds: float) -> None:
    assert retry_after_s(header) == seconds


def dying(*replicas: tuple[str, str, int], alive: str = "") -> Fleet:
    """As `fleet`, of whom only `alive` answers from now on."""
    made = fleet(*replicas)
    for replica in made.replicas.values():
        replica.alive = replica.name == alive
    return made


def kept(made: Fleet, now: float) -> set[str]:
    made.forget(now)
    return set(made.replicas)


def test_one_that_was_overtaken_while_it_was_silent_is_forgotten_and_its_next_word_brings_it_back() -> None:
    made = dying(("dead", "rollout", 1), ("new", "rollout", 2), alive="new")
    assert kept(made, GONE_S) == {"dead", "new"}
    assert kept(made, GONE_S + 1) == {"new"}
    made.apply(PolicyApplied(run="r", replica="dead", url="http://dead", serial=2), GONE_S + 2)
    assert kept(made, GONE_S + 3) == {"dead", "new"}


def test_so_is_one_that_left_the_rotation_with_a_word() -> None:
    made = dying(("left", "rollout", 1))
    made.apply(PolicyApplied(run="r", replica="left", url="http://left", serial=1, ok=False, reason="it ends"))
    assert kept(made, GONE_S + 1) == set()


def test_one_that_has_nothing_newer_to_say_is_kept_for_a_day_and_while_no_other_lives() -> None:
    alone = dying(("a", "rollout", 1), ("b", "rollout", 1))
    assert kept(alone, 2 * MUTE_S) == {"a", "b"}  # a network that was cut, perhaps: nobody would say that it is back
    made = dying(("a", "rollout", 1), ("b", "rollout", 1), ("e", "evaluation", 0), alive="b")
    assert kept(made, GONE_S + 1) == {"a", "b", "e"}
    assert kept(made, MUTE_S + 1) == {"b"}


def test_what_answers_is_never_forgotten() -> None:
    made = fleet(("old", "rollout", 1), ("new", "rollout", 9))
    assert kept(made, 2 * MUTE_S) == {"old", "new"}


def test_a_replica_in_rotation_that_answers_nothing_is_told_as_silent_after_some_seconds() -> None:
    made = fleet(("a", "rollout", 1), ("left", "rollout", 1), ("eval", "evaluation", 1), ("b", "rollout", 1))
    made.apply(PolicyApplied(run="r", replica="left", url="http://left", serial=1, ok=False))
    for replica in made.replicas.values():
        replica.last_answer, replica.alive = 10.0, replica.name == "b"
    assert made.silent(10.0 + SILENT_S) == {}
    assert made.silent(10.1 + SILENT_S) == {"r": ["a"]}
    made.replicas["a"].alive = True
    assert made.silent(99.0) == {}
