"""The flow as SVG, drawn on the server: colours come from the style sheet by class. Pure."""

from __future__ import annotations

from markupsafe import Markup, escape

from services.console.flow import Edge, Flow, Node
from services.console.visible import visible
from shared.contracts import topics as t

WIDTH, HEIGHT = 1000, 400
BOX, TALL = 176, 84
PLACES = {  # middle of each box
    "curator": (100, 110),
    "scheduler": (360, 110),
    "rollout": (630, 110),
    "reward": (890, 110),
    "evaluator": (100, 320),
    "trainer": (360, 320),
    "inference": (630, 320),
    "grader": (890, 320),
}
_UP, _LOW = 110 - TALL // 2, 110 + TALL // 2
# The line of each way and the place of its words (x, y, anchor).
LINES: dict[str, tuple[str, tuple[int, int, str]]] = {
    t.PROBLEMS_ADMITTED.name: ("188,110 272,110", (230, 84, "middle")),
    t.ROLLOUTS_REQUESTED.name: ("448,110 542,110", (495, 84, "middle")),
    t.ROLLOUTS_FINISHED.name: ("718,110 802,110", (760, 84, "middle")),
    t.ROLLOUTS_SCORED.name: (f"890,{_UP} 890,30 360,30 360,{_UP}", (625, 20, "middle")),
    t.GROUPS_READY.name: (f"330,{_LOW} 330,278", (322, 205, "end")),
    t.STEPS_COMMITTED.name: (f"390,278 390,{_LOW}", (398, 222, "start")),
    t.POLICIES_PUBLISHED.name: ("448,320 542,320", (495, 302, "middle")),
    "tokens": (f"630,278 630,{_LOW}", (638, 215, "start")),
    "jobs": (f"890,{_LOW} 890,278", (898, 215, "start")),
    "evaluations": (f"100,278 100,240 560,240 560,{_LOW}", (200, 232, "middle")),
}
SAID_CHARS = 30  # of a line within a box; the whole is in its title


def draw(flow: Flow) -> Markup:
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" class="flow" role="img" aria-label="How work flows; the tables below say the same">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="tip" d="M0,0 L8,4 L0,8 z"/></marker></defs>',
        *(_line(edge) for edge in flow.edges),
        *(_box(node) for node in flow.nodes),
        "</svg>",
    ]
    return Markup("".join(parts))


def _line(edge: Edge) -> str:
    points, (x, y, anchor) = LINES[edge.way.what]
    kind = "way awaited" if edge.awaited else "way"
    said = [edge.way.what, *filter(None, [waiting(edge), pace(edge)])]
    lines = "".join(f'<tspan x="{x}" dy="{0 if i == 0 else 13}">{_text(line)}</tspan>' for i, line in enumerate(said))
    lift = 13 * (len(said) - 1) if y < 105 and anchor == "middle" and y > 40 else 0  # upwards, away from the line
    return (
        f'<polyline class="{kind}" points="{points}" marker-end="url(#tip)"/>'
        f'<text class="said" x="{x}" y="{y - lift}" text-anchor="{anchor}">{lines}</text>'
    )


def _box(node: Node) -> str:
    x, y = PLACES[node.service]
    state = (
        {"ready": "ready"}.get(node.state, f"{node.state}")
        if node.replicas < 2
        else f"{node.ready} of {node.replicas} ready"
    )
    wait = f"waits on {node.wait.what} since {since(node.wait.seconds)}" if node.wait else ""
    lines = [(node.service, "name"), (state, "state"), (node.figure, "figure"), (wait, "wait")]
    shown = [(text, kind) for text, kind in lines if text]
    top = y - 6 * (len(shown) - 1) + 1
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
