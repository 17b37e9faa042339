"""Behaviour terms of this project: one module each, with a function `find`. The module's name is the term's (shared.terms).

To add one, write `services/reward/terms/NAME.py` and its test. A term without a weight changes no reward: it is computed, shown and
watched. Terms that nobody gave a reason for here are in docs/reward.md.
"""
