"""The flow as SVG, drawn on the server: colours come from the style sheet by class. Pure."""

from __future__ import annotations

from typing import NamedTuple

from markupsafe import Markup, escape

from services.console.flow import Edge, Flow, Node
from shared.contracts import topics as t
from shared.visible import visible

WIDTH, HEIGHT = 1060, 404
BOX, TALL = 160, 96
LINE = 13  # between two lines of words
UPPER, LOWER = 130, 346  # middles of the two rows
PLACES = {  # middle of each box
    "curator": (90, UPPER),
    "scheduler": (383, UPPER),
    "rollout": (676, UPPER),
    "reward": (969, UPPER),
    "evaluator": (90, LOWER),
    "trainer": (383, LOWER),
    "inference": (676, LOWER),
    "grader": (969, LOWER),
}
_TOP, _UNDER, _OVER = UPPER - TALL // 2, UPPER + TALL // 2, LOWER - TALL // 2


class _Words(NamedTuple):
    """Where the words of a way stand. `above`: they end over the line, however many they are."""

    x: int
    y: int
    anchor: str
    above: bool = False


LINES: dict[str, tuple[str, _Words]] = {
    t.PROBLEMS_ADMITTED.name: (f"170,{UPPER} 301,{UPPER}", _Words(236, UPPER - 8, "middle", above=True)),
    t.ROLLOUTS_REQUESTED.name: (f"463,{UPPER} 594,{UPPER}", _Words(529, UPPER - 8, "middle", above=True)),
    t.ROLLOUTS_FINISHED.name: (f"756,{UPPER} 887,{UPPER}", _Words(822, UPPER - 8, "middle", above=True)),
    t.ROLLOUTS_SCORED.name: (f"969,{_TOP} 969,20 383,20 383,{_TOP - 2}", _Words(676, 36, "middle")),
    t.GROUPS_READY.name: (f"345,{_UNDER} 345,{_OVER - 2}", _Words(336, 212, "end")),
    t.STEPS_COMMITTED.name: (f"420,{_OVER} 420,{_UNDER + 2}", _Words(429, 212, "start")),
    t.POLICIES_PUBLISHED.name: (f"463,{LOWER} 594,{LOWER}", _Words(529, LOWER - 8, "middle", above=True)),
    "tokens": (f"695,{_OVER} 695,{_UNDER + 2}", _Words(704, 218, "start")),
    "jobs": (f"969,{_UNDER} 969,{_OVER - 2}", _Words(978, 218, "start")),
    "evaluations": (f"90,{_OVER} 90,270 640,270 640,{_UNDER + 2}", _Words(150, 263, "middle")),
}
SAID_CHARS = 25  # of a line within a box; the whole is in its title


def draw(flow: Flow) -> Markup:
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" class="flow" role="img" '
        'aria-label="How work flows between the services; the tables below say the same">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
        'markerUnits="userSpaceOnUse" orient="auto"><path class="tip" d="M0,0 L8,4 L0,8 z"/></marker></defs>',
        *(_line(edge) for edge in flow.edges),
        *(_box(node) for node in flow.nodes),
        "</svg>",
    ]
    return Markup("".join(parts))


def _line(edge: Edge) -> str:
    points, at = LINES[edge.way.what]
    said = [edge.way.what, *filter(None, [waiting(edge), pace(edge)])]
    top = at.y - LINE * (len(said) - 1) if at.above else at.y
    lines = "".join(f'<tspan x="{at.x}" y="{top + LINE * i}">{_text(line)}</tspan>' for i, line in enumerate(said))
    return (
        f'<polyline class="{"way awaited" if edge.awaited else "way"}" points="{points}" marker-end="url(#tip)"/>'
        f'<text class="said" text-anchor="{at.anchor}">{lines}</text>'
    )


def _box(node: Node) -> str:
    x, y = PLACES[node.service]
    state = node.state if node.replicas < 2 else f"{node.ready} of {node.replicas} ready"
    lines = [(node.service, "name"), (state, "state"), (node.figure, "figure")]
    if node.wait:
        lines += [(f"waits on {node.wait.what}", "wait"), (f"since {since(node.wait.seconds)}", "wait")]
    shown = [(text, kind) for text, kind in lines if text]
    top = y - 7.5 * (len(shown) - 1) + 4
    words = "".join(
        f'<text class="{kind}" x="{x}" y="{top + 15 * i}" text-anchor="middle">{_text(_cut(text))}</text>'
        for i, (text, kind) in enumerate(shown)
    )
    told = ". ".join(text for text, _ in shown)
    return (
        f'<g class="node {node.state}"><title>{_text(told)}</title>'
        f'<rect x="{x - BOX // 2}" y="{y - TALL // 2}" width="{BOX}" height="{TALL}" rx="8"/>{words}</g>'
    )


def waiting(edge: Edge) -> str:
    return "" if edge.waiting is None else f"{edge.waiting:,} waiting"


def pace(edge: Edge) -> str:
    """How many a minute, and how old they were when they were taken."""
    said = [] if edge.per_minute is None else [f"{edge.per_minute:,.0f}/min"]
    return ", ".join([*said, *([] if edge.age_s is None else [f"{since(edge.age_s)} old"])])


def since(seconds: float) -> str:
    """12 s, 3 min, 2.5 h: enough to act on."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _cut(text: str) -> str:
    return text if len(text) <= SAID_CHARS else f"{text[: SAID_CHARS - 1]}…"


def _text(text: str) -> str:
    return str(escape(visible(text)))
