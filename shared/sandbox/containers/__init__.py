"""Sandboxes in containers of a Docker engine: an adapter of shared.sandbox.contract.

`engine` finds the engine, `volumes` and `bundle` bring the loop's interpreter into it, `images` makes bases, `machine` runs one
container, `stream` speaks with it, `reaper` removes what dead workers left. docs/sandboxes.md, In containers of an engine.
"""
