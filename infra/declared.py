"""What the code declares: metrics and settings. Read from the source, so that nothing heavy is imported for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.__main__ import settings_classes
from shared.settings import ServiceSettings

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("services", "shared", "etude")
KINDS = ("Counter", "Gauge", "Histogram", "Summary")

# What Prometheus itself and its client in every process add: name -> (labels, meaning).
FOREIGN: dict[str, tuple[tuple[str, ...], str]] = {
    "up": ((), "Prometheus: 1 if the last scrape of this target succeeded."),
    "process_cpu_seconds_total": ((), "Every process: processor time."),
    "process_resident_memory_bytes": ((), "Every process: resident memory."),
}
# What Prometheus puts on every series that it scrapes (infra/prometheus/prometheus.yml).
TARGET_LABELS = ("job", "instance")


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` as declared; `series` as scraped."""

    name: str
    kind: str
    about: str
    labels: tuple[str, ...]
    where: str  # module

    @property
    def series(self) -> dict[str, tuple[str, ...]]:
        """Names that a scrape shows, with their labels."""
        if self.kind == "Counter":
            return {f"{self.name.removesuffix('_total')}_total": self.labels}
        if self.kind == "Histogram":
            parts = {f"{self.name}_{part}": self.labels for part in ("sum", "count")}
            return {**parts, f"{self.name}_bucket": (*self.labels, "le")}
        return {self.name: self.labels}


def metrics() -> list[Metric]:
    """Every metric of the rooms, by module and in the order of the source. Raises ValueError for one whose name, text or
    labels are no literals: nobody could look it up."""
    return [found for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) for found in _metrics_of(path)]


def _metrics_of(path: Path) -> Iterator[Metric]:
    text = path.read_text()
    if "prometheus_client" not in text:
        return
    where = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS):
            continue
        try:
            values = [ast.literal_eval(argument) for argument in node.args]
        except ValueError:
            raise ValueError(f"{path}:{node.lineno}: a metric's name, text and labels must be literals") from None
        name, about, *rest = values
        yield Metric(name, node.func.id, about, tuple(rest[0]) if rest else (), where)


def series() -> dict[str, tuple[str, ...]]:
    """Every series that a scrape can show, with its labels; the target's own labels left out."""
    own = {name: labels for metric in metrics() for name, labels in metric.series.items()}
    return {**own, **{name: labels for name, (labels, _) in FOREIGN.items()}}


def literal(module: str, name: str) -> Any:
    """The value of a module's constant, without importing the module. Raises KeyError."""
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return ast.literal_eval(node.value)
    raise KeyError(f"{module}: no constant {name}")


@dataclass(frozen=True, slots=True)
class Setting:
    name: str  # ETUDE_…
    kind: str
    default: str
    allowed: str
    about: str


def settings() -> dict[str, list[Setting]]:
    """Settings by the class that declares them: `ServiceSettings` first, then each service's own."""
    titles = {cls.__name__.removesuffix("Settings").removesuffix("Config"): cls for cls in settings_classes()}
    own = {title: _settings_of(cls, inherited=True) for title, cls in titles.items()}
    return {"Every service": _settings_of(ServiceSettings, inherited=False), **own}


def fields() -> list[str]:
    """Every field that some service declares."""
    return sorted({field for cls in settings_classes() for field in cls.model_fields})


def _settings_of(cls: type[ServiceSettings], *, inherited: bool) -> list[Setting]:
    properties = cls.model_json_schema()["properties"]
    own = [name for name in cls.model_fields if not inherited or name not in ServiceSettings.model_fields]
    return [
        Setting(
            f"ETUDE_{name.upper()}",
            _kind(properties[name]),
            _default(properties[name]),
            _allowed(properties[name]),
            cls.model_fields[name].description or "",
        )
        for name in own
    ]


def _kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_kind(part) for part in schema["anyOf"] if part.get("type") != "null")
    return {"path": "path", "password": "secret"}.get(schema.get("format", ""), schema.get("type", "any"))


def _default(schema: dict[str, Any]) -> str:
    value = schema.get("default")
    return "" if value in ("", None, []) else str(value)


_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def _allowed(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "allowed" in schema:  # a pattern that people need not read
        return str(schema["allowed"])
    if "pattern" in schema:
        return ", ".join(schema["pattern"].strip("^$()").split("|"))
    return ", ".join(f"{words} {schema[key]:g}" for key, words in _BOUNDS.items() if key in schema)
