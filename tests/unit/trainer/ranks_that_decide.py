"""One of two ranks, as a process: three steps, in the second of which only rank 1's part of the gradient is not finite. It owns the
last parameters under ZeRO, among them the last norm. Says "<step> <applied> <moved> <norm>", then what a checkpoint holds."""

from __future__ import annotations

import os

import torch
from rank_processes import say
from synthetic import policy
from test_ranks import CONFIG

from services.trainer.engine import Engine


def main() -> None:
    torch.set_num_threads(1)
    model = policy()
    engine = Engine(model, CONFIG, zero_stage=1)
    assert engine.from_all(engine.mesh.rank) == [0, 1]
    for step, poison in ((1, 1.0), (2, float("inf")), (3, 1.0)):
        before = [p.detach().clone() for p in model.parameters()]
        with engine.forward_weights():
            engine.backward(sum((p * 0.01).sum() for p in model.parameters()) + model.norm.weight.sum() * poison)
        result = engine.step(step)
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        say(step, result.applied, moved, f"{result.grad_norm:.6g}")
    say("state", sorted((k, float(v.double().sum())) for k, v in engine.state().items())[:5])
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
