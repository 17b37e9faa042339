"""Everything was done in the terminal, although there are tools for it: nobody can follow such work."""

from __future__ import annotations

from shared.terms import Evidence, Found, Seen

FEWEST = 4  # fewer calls are no collapse, only a short attempt


def find(seen: Seen) -> Found:
    """Return 1 where FEWEST calls or more were all commands. A problem that offers nothing else to work with has no collapse."""
    if seen.effects and not any(effect in ("reads", "changes") for effect in seen.effects.values()):
        return Found()
    effects = [seen.effect(span.tool) for _, span in seen.calls()]
    worked = [effect for effect in effects if effect not in ("ends", "notes")]
    if len(worked) < FEWEST or any(effect != "runs" for effect in worked):
        return Found()
    return Found(1.0, [Evidence(f"{len(worked)} calls, all of them in the terminal")])
