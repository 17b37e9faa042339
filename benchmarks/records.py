"""What every benchmark shares: its arguments, its records, its table.

A record is {"id", "what", "value", "unit", "against", "repeats", "spread"}: `value` is the median of `repeats`
measurements, `spread` their range (greatest minus least) in the same unit, `against` what to compare with, in words
("" if nothing). A benchmark's `main` is

    def main() -> None:
        bench = Bench.start(__doc__)
        bench.measure("bus.publish", "…", "messages/s", lambda: publish(bench.pick(20_000, 2_000)))
        bench.end()

and takes `--json FILE` and `--quick`. `python -m benchmarks.records FILE…` prints the table of many files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from shared.output import NotWritable, require_writable, write_whole

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Record:
    id: str
    what: str
    value: float
    unit: str
    against: str
    repeats: int
    spread: float


def record(id: str, what: str, values: Iterable[float], unit: str, against: str = "") -> Record:
    """The median of `values` and their range."""
    values = list(values)
    return Record(id, what, statistics.median(values), unit, against, len(values), max(values) - min(values))


def write(path: Path, records: list[Record]) -> None:
    """Atomically: a list of records as JSON."""
    write_whole(path, json.dumps([asdict(r) for r in records], indent=2) + "\n")


def read(path: Path) -> list[Record]:
    """Raises ValueError where the file holds no records."""
    try:
        return [Record(**entry) for entry in json.loads(path.read_text())]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: no list of records: {error}") from None


def show(records: list[Record]) -> None:
    """One table on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name, justify in (("id", "left"), ("what", "left"), ("value", "right"), ("unit", "left"), ("± range", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("n", justify="right")
    table.add_column("against")
    for r in records:
        table.add_row(r.id, r.what, _figure(r.value), r.unit, _figure(r.spread), str(r.repeats), r.against)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _figure(value: float) -> str:
    """Three digits that matter, thousands apart."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(slots=True)
class Bench:
    """One run of one benchmark."""

    quick: bool
    json: Path | None
    only: str | None = None  # a part
    records: list[Record] = field(default_factory=list)

    @classmethod
    def start(cls, doc: str | None, argv: list[str] | None = None, parts: Sequence[str] = ()) -> Bench:
        """Reads the command line. `parts`: names that `--only` may choose from; see `wants`."""
        parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
        parser.add_argument(
            "--quick", action="store_true", help="smaller sizes, fewer repeats, and only peers that are here"
        )
        if parts:
            parser.add_argument("--only", choices=parts, help="one part of it alone")
        arguments = parser.parse_args(argv)
        if arguments.json:
            try:
                require_writable(arguments.json, "--json")
            except NotWritable as error:
                parser.error(str(error))
        return cls(arguments.quick, arguments.json, getattr(arguments, "only", None))

    def wants(self, part: str) -> bool:
        return self.only in (None, part)

    def pick(self, full: T, quick: T) -> T:
        return quick if self.quick else full

    def measure(
        self, id: str, what: str, unit: str, run: Callable[[], float], *, against: str = "", repeats: int = 5
    ) -> Record:
        """Runs `run` (which returns one measurement) `repeats` times, 2 when quick; keeps and returns the record."""
        return self.add(record(id, what, [run() for _ in range(self.pick(repeats, 2))], unit, against))

    def add(self, new: Record) -> Record:
        self.records.append(new)
        return new

    def end(self) -> None:
        """Prints the table and writes the file."""
        show(self.records)
        if self.json:
            write(self.json, self.records)


def main(argv: list[str]) -> int:
    if not argv:
        print("usage: python -m benchmarks.records FILE.json …", file=sys.stderr)
        return 2
    show([entry for name in argv for entry in read(Path(name))])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
