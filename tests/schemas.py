"""The published schemas of agent-sandbox, and what is wrong with an object by one of them.

tests/data/agent_sandbox.json.gz holds its custom resource definitions, version v1beta1, at the commit named there (Apache-2.0).

Knows the keywords that structural schemas of custom resources use. Fields that a schema does not name are wrong, as they are for
a request with `fieldValidation=Strict`.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parent / "data/agent_sandbox.json.gz"
SCHEMAS: dict[str, Any] = json.loads(gzip.decompress(_FILE.read_bytes()))["schemas"]
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "number": (int, float),
}
_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ\Z")


def wrong(resource: str, found: object) -> list[str]:
    """Return what is wrong, each with its place. `resource`: plural and group, e.g. `sandboxes.agents.x-k8s.io`."""
    return list(_wrong(SCHEMAS[resource], found, ""))


def _wrong(schema: dict[str, Any], found: Any, at: str) -> Iterator[str]:
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(found, bool) or not isinstance(found, int | str):
            yield f"{at}: {found!r} is neither a number nor a string"
        elif isinstance(found, str) and not re.search(schema.get("pattern", ""), found):
            yield f"{at}: {found!r} does not match"
        return
    kind = schema.get("type")
    if kind and (not isinstance(found, _TYPES[kind]) or (kind == "integer" and isinstance(found, bool))):
        yield f"{at}: {found!r:.80} is no {kind}"
        return
    if "enum" in schema and found not in schema["enum"]:
        yield f"{at}: {found!r} is none of {schema['enum']}"
    if "minimum" in schema and found < schema["minimum"]:
        yield f"{at}: {found!r} is below {schema['minimum']}"
    if isinstance(found, str):
        yield from _wrong_text(schema, found, at)
    if isinstance(found, list):
        for number, one in enumerate(found):
            yield from _wrong(schema.get("items", {}), one, f"{at}[{number}]")
    if isinstance(found, dict) and (at or "properties" in schema):
        yield from _wrong_fields(schema, found, at)


def _wrong_text(schema: dict[str, Any], found: str, at: str) -> Iterator[str]:
    if not re.search(schema.get("pattern", ""), found):
        yield f"{at}: {found!r:.80} does not match {schema['pattern']}"
    if len(found) < schema.get("minLength", 0) or len(found) > schema.get("maxLength", len(found)):
        yield f"{at}: {found!r:.80} is too short or too long"
    if schema.get("format") == "date-time" and not _DATE.match(found):
        yield f"{at}: {found!r} is no time"


def _wrong_fields(schema: dict[str, Any], found: dict[str, Any], at: str) -> Iterator[str]:
    named, more = schema.get("properties", {}), schema.get("additionalProperties")
    yield from (f"{at}.{name}: is missing" for name in schema.get("required", ()) if name not in found)
    for name, one in found.items():
        if name in named:
            yield from _wrong(named[name], one, f"{at}.{name}")
        elif isinstance(more, dict):
            yield from _wrong(more, one, f"{at}.{name}")
        elif named and more is None:
            yield f"{at}.{name}: the schema knows no such field"
