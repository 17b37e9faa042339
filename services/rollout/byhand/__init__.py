"""One attempt by hand: `etude rollout run`, `show` and `export`.

The attempt runs through the same agent loop, recorder, environment and grader as the attempts of a run. Only the model is
plugged in differently (`policies`). It touches no bus, no ledger and no run: the result is a folder (`kept`).
"""
