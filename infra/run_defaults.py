"""What a run learns with: the fields of its configuration and the constants beside them, from the code.

What is said of a field is the comment above it and beside it, so that the contract stays the one place to write it.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from etude.demo import DemoOptions
from etude.demo.prepare import configure
from infra.declared import ROOT, literal
from shared.contracts.allowed import declared
from shared.contracts.run import Ref, RunConfig

# Numbers that no run sets: they are part of what is learnt, but nobody has had a reason to change one. Module -> names.
CONSTANTS: dict[str, tuple[str, ...]] = {
    "shared.environments.function.workspace": ("MAX_BROKEN",),
    "services.scheduler.reconciler": ("FIRST_DELAY_S", "CANCEL_GRACE_S"),
    "services.scheduler.records": ("GROUPS_PER_PROBLEM",),
    "services.scheduler.requesting": ("GROUPS_AHEAD",),
    "services.scheduler.hardness": (
        "PRIOR_MEAN", "RUN_STRENGTH", "TAG_STRENGTH", "CELL_STRENGTH", "ATTEMPT_WEIGHT", "PROBE_WEIGHT", "HALF_LIFE_STEPS",
        "EXPLORATION", "SHARPNESS", "UNIFORM_STEPS", "CATEGORY_FLOOR", "TILT", "TILT_STEPS", "FLOOR", "MAX_CELLS",
    ),
    "shared.problems.splits": ("HELD_OUT",),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Default:
    """`demo`: what `etude demo` sets it to without options, where that is another value."""

    name: str  # as in the stored JSON: train.credit.per
    kind: str
    value: str
    demo: str
    allowed: str
    about: str


def sections() -> dict[str, tuple[str, list[Default]]]:
    """Title -> (what the structure's docstring promises, its fields), outermost first."""
    ref = Ref(key="", size=0, checksum="")
    plain = RunConfig(run="", base=ref, pack=ref, pack_hidden=ref)
    demo = configure("", DemoOptions(), ref, (ref, ref), (ref, ref), ref)
    return dict(_sections("", RunConfig, plain, demo))


def _sections(
    prefix: str, struct: type[msgspec.Struct], plain: Any, demo: Any
) -> Iterator[tuple[str, tuple[str, list[Default]]]]:
    told, hints = comments("shared.contracts.run", struct.__name__), get_type_hints(struct)
    rules = get_type_hints(struct, include_extras=True)
    rows: list[Default] = []
    inner: list[tuple[str, type[msgspec.Struct], Any, Any]] = []
    for name in struct.__struct_fields__:
        value, there = getattr(plain, name), getattr(demo, name)
        if isinstance(value, msgspec.Struct) and not isinstance(value, Ref):
            inner.append((f"{prefix}{name}.", type(value), value, there))
            continue
        shown, changed = ("", "") if Ref in _parts(hints[name]) else (_show(value), _show(there))
        if f"{prefix}{name}" == "run":
            shown = changed = ""  # a new one for every run
        changed = changed if changed != shown else ""
        ranges = "; ".join(map(str, declared(rules[name])))
        rows.append(Default(prefix + name, _kind(hints[name]), shown, changed, ranges, told[name]))
    title = prefix.rstrip(".") or "The run"
    yield title, (" ".join((struct.__doc__ or "").split("\n\n")[0].split()), rows)
    for part in inner:
        yield from _sections(*part)


def constants() -> list[Default]:
    return [
        Default(f"{module}.{name}", "", _show(literal(module, name)), "", "", told[name])
        for module, names in CONSTANTS.items()
        for told in [comments(module, "")]
        for name in names
    ]


def comments(module: str, cls: str) -> dict[str, str]:
    """Name -> the comment above and beside it, as a sentence. `cls`: a class of the module, or "" for its constants."""
    text = ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text()
    body: list[ast.stmt] = ast.parse(text).body
    if cls:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == cls)
    found = {
        token.start[0]: (token.string.lstrip("# "), not token.line[: token.start[1]].strip())
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    told = {}
    for node in body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if (
            len(targets) != 1
            or not isinstance(targets[0], ast.Name)
            or not isinstance(node, ast.Assign | ast.AnnAssign)
        ):
            continue
        first = node.lineno
        while found.get(first - 1, ("", False))[1]:
            first -= 1
        lines = [found[n][0] for n in range(first, (node.end_lineno or node.lineno) + 1) if n in found]
        told[targets[0].id] = _sentence(" ".join(lines))
    return told


def _sentence(text: str) -> str:
    """A comment as a table's cell has it. What begins with a value (`attempt: …`) or a number keeps its small letter."""
    words = text.split()
    if words and words[0].isalpha():
        text = text[0].upper() + text[1:]
    return text and text + ("" if text.endswith(".") else ".")


def _parts(hint: Any) -> set[Any]:
    return {hint} | set(get_args(hint))


def _kind(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    if Ref in _parts(hint):
        return "reference"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_kind, get_args(hint)))
    names = {bool: "true or false", int: "integer", float: "number", str: "string"}
    several = {tuple: "numbers", list: "names", dict: "name → number"}
    return names.get(hint) or several[get_origin(hint)]


def _show(value: Any) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{name} {weight:g}" for name, weight in value.items())
    if isinstance(value, list) and value:
        return ", ".join(value)
    if isinstance(value, tuple):
        return ", ".join(f"{item:g}" for item in value)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
