"""When drafts are made: where they pay, and hardly ever where they do not."""

from __future__ import annotations

import numpy as np
import pytest

from services.inference.gate import LOSS, MAX_WAIT, PLAIN, WAIT, Gate

K = 1  # drafts per step


class Machine:
    """Steps as the gate wants them. One of `sessions` without drafts takes a second, with drafts `cost`; a draft is accepted with
    a probability. Now and then a step is interrupted. `slow`: the machine's other speed, for stretches of about `hold` steps."""

    def __init__(self, gate: Gate, seed: int = 0, slow: float = 1.0, hold: float = 1.0) -> None:
        self.gate, self.random, self.slow, self.hold = gate, np.random.default_rng(seed), slow, hold
        self.speed = 1.0

    def spend(self, steps: int, cost: float, accepted: float, sessions: int = 1) -> tuple[float, float, int]:
        """Tokens per session, seconds at full speed, and how many steps drafted."""
        tokens = seconds = 0.0
        drafting = 0
        for _ in range(steps):
            drafted = self.gate.wants(sessions)
            if self.random.random() < 1 / self.hold:
                self.speed = self.slow if self.speed == 1 else 1.0
            least = cost if drafted else 1.0
            took = (
                least * self.speed * (1 + abs(self.random.normal(0, 0.05))) * (50 if self.random.random() < 0.01 else 1)
            )
            got = sessions + (self.random.binomial(sessions, accepted) if drafted else 0)
            self.gate.observe(sessions, drafted, took, got)
            tokens, seconds, drafting = tokens + got / sessions, seconds + least, drafting + drafted
        return tokens, seconds, drafting


@pytest.mark.parametrize("sessions", [1, 8, 40])
@pytest.mark.parametrize("accepted", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("cost", [1.0, 1.5, 2.3, 4.0])
def test_it_costs_little_where_drafts_do_not_pay_and_takes_them_where_they_do(cost, accepted, sessions):
    machine = Machine(Gate(1 + K))
    machine.spend(4000, cost, accepted, sessions)
    tokens, seconds, _ = machine.spend(16_000, cost, accepted, sessions)
    assert tokens / seconds >= 0.97 * max(1.0, (1 + accepted) / cost)


@pytest.mark.parametrize("slow", [1.5, 2.2])
@pytest.mark.parametrize("hold", [15, 100, 1000])
def test_a_machine_that_changes_its_speed_does_not_make_it_draft_at_a_loss(slow, hold):
    tokens = seconds = 0.0
    for seed in range(10):
        more, took, _ = Machine(Gate(1 + K), seed, slow, hold).spend(6000, 2.3, 0.6)
        tokens, seconds = tokens + more, seconds + took
    assert tokens / seconds >= 0.985


@pytest.mark.parametrize("slow", [1.5, 2.2])
def test_a_machine_that_changes_its_speed_does_not_keep_it_from_drafts_that_pay(slow):
    tokens = seconds = 0.0
    for seed in range(10):
        machine = Machine(Gate(1 + K), seed, slow, 300)
        machine.spend(6000, 1.2, 0.7)
        more, took, _ = machine.spend(6000, 1.2, 0.7)
        tokens, seconds = tokens + more, seconds + took
    assert tokens / seconds >= 0.97 * 1.7 / 1.2


def test_drafts_that_cannot_pay_whatever_is_accepted_are_tried_for_a_few_steps():
    *_, drafted = Machine(Gate(1 + K)).spend(2 * WAIT, 2.3, 1.0)
    assert 0 < drafted <= PLAIN


@pytest.mark.parametrize("cost", [1.2, 1.7, 2.3, 4.0])
def test_after_a_trial_that_failed_it_waits_until_the_loss_is_a_small_share(cost):
    gate = Gate(1 + K)
    machine, drafted, waited = Machine(gate), 0, 0
    while not drafted or gate.wants(1):
        drafted += gate.wants(1)
        machine.spend(1, cost, 0.0)
    while not gate.wants(1):
        machine.spend(1, cost, 0.0)
        waited += 1
    assert waited >= min(0.9 * drafted * (cost - 1) / LOSS, MAX_WAIT)  # 0.9: it knows what a step costs by its median


def test_it_follows_a_change():
    machine = Machine(Gate(1 + K))
    machine.spend(4000, 1.1, 0.6)
    assert machine.spend(400, 1.1, 0.6)[2] > 300
    machine.spend(40_000, 1.1, 0.0)  # the policy has moved away from its MTP layer
    assert machine.spend(400, 1.1, 0.0)[2] < 100


def test_batches_of_other_sizes_are_judged_apart_and_of_like_sizes_together():
    gate = Gate(1 + K)
    machine = Machine(gate)
    for _ in range(500):
        for sessions in (1, 33, 40, 47):
            machine.spend(4, 1.1 if sessions == 1 else 2.3, 0.6, sessions)
    assert machine.spend(400, 1.1, 0.6, 1)[2] > 300
    assert machine.spend(400, 2.3, 0.6, 63)[2] < 100
    gate = Gate(1 + K)
    machine = Machine(gate)
    machine.spend(WAIT // 2, 2.3, 0.6, 33)
    machine.spend(WAIT // 2, 2.3, 0.6, 47)
    assert machine.spend(4 * PLAIN, 2.3, 0.6, 40)[2] > 0  # the steps of both count towards one trial
