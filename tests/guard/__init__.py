"""A guard over the path of an attempt: the rollout service, the `test` tool, the graders and the score.

A seeded stand-in for the engine answers attempts at a pack of function problems. The guard folds trajectories, verdicts and
rewards into one digest. Whoever restructures that path runs it before and after; equal digests mean equal bytes.

    python -m tests.guard --pack DIR --attempts 600 --seed 1 --json before.json
    python -m tests.guard --pack DIR --attempts 600 --seed 1 --against before.json

It depends only on what outlives a restructuring: the two entry points in `entry`, messages on the bus, objects in the store
and the codec of trajectories. It writes compact-1 itself, token by token.
"""
