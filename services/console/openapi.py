"""What the console answers to as an OpenAPI document (`GET /openapi.json`). Pure.

Queries and forms are read leniently: a query that is none of what is allowed is read as the first of it. What is left out here,
tests miss: they send whatever this document allows, and much that it does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from services.console.control import REASON_CHARS
from services.console.starting import MOST
from shared.contracts.run import Purpose
from shared.contracts.standing import Of, State

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """`query`, `form`: name -> schema, none of them required. `acts`: it needs an operator's token, in the header or by a session's
    cookie and its `form_key`."""

    method: str
    path: str
    about: str
    query: dict[str, Schema] = field(default_factory=dict)
    form: dict[str, Schema] | None = None
    acts: bool = False


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 99_999_999}
_WHY: Schema = {"type": "string", "maxLength": REASON_CHARS}
_ACTING: dict[str, Schema] = {"form_key": _TEXT, "reason": _WHY}
_RUN = "/runs/{run}"

OPERATIONS = (
    Operation("get", "/", "Runs, services and what lies between them, replicas, alerts.", {"page": _COUNT}),
    Operation("get", _RUN, "A run: figures, curves, what was done to it."),
    Operation("get", f"{_RUN}/problems", "How hard its problems are held to be, and why.", {
        "of": _one_of(*Of), "state": _one_of("", *State), "cell": _TEXT, "sort": _TEXT, "order": _one_of("asc", "desc"),
        "page": _COUNT,
    }),
    Operation("get", f"{_RUN}/attempts", "Its latest attempts.", {
        "outcome": _one_of("", "solved", "unsolved"), "purpose": _one_of("", *Purpose), "problem": _TEXT, "page": _COUNT,
    }),
    Operation("get", f"{_RUN}/attempts/{{attempt}}", "One attempt: terms, conversation, token by token.", {
        "segment": _COUNT, "token": _COUNT, "row": _COUNT,
    }),
    Operation("get", "/compare", "Two to four runs side by side.", {"run": {"type": "array", "items": _TEXT}}),
    Operation("get", "/alerts", "The newest alerts, with examples."),
    Operation("get", "/sign-in", "A form for a token.", {"next": _TEXT}),
    Operation("post", "/sign-in", "A session for who holds a token.", form={"token": _TEXT, "next": _TEXT}),
    Operation("post", "/sign-out", "Ends the session.", form={"form_key": _TEXT}),
    Operation("post", f"{_RUN}/pause", "Nothing more is asked for.", form={**_ACTING, "drain": _one_of("on", "off")}, acts=True),
    Operation("post", f"{_RUN}/resume", "Goes on.", form=_ACTING, acts=True),
    Operation("post", f"{_RUN}/stop", "Ends it.", form=_ACTING, acts=True),
    Operation("post", f"{_RUN}/rollback", "Goes on from a version.", form={**_ACTING, "version": _COUNT}, acts=True),
    Operation("post", f"{_RUN}/start", "A new run as this one was started.", form={
        **_ACTING,
        "minutes": {"type": "number", "minimum": 0, "maximum": MOST["minutes"]},
        "max_steps": {"type": "integer", "minimum": 0, "maximum": MOST["max_steps"]},
        "seed": {"type": "integer", "minimum": 0, "maximum": MOST["seed"]},
    }, acts=True),
    Operation("get", "/static/{name}", "Style, script, icon."),
)  # fmt: skip
_ANSWERS = {
    "200": "a page",
    "303": "done, or sign in first: the page to go to",
    "400": "the form cannot be read",
    "401": "a token is needed, or nobody has this one",
    "403": "this token may not, or the form is of another session or site",
    "404": "there is no such run, attempt or page",
    "409": "it does not apply, or a field is wrong: what was found, what is allowed; nothing was done",
    "413": "the form is too long",
    "415": "it is no form of this kind",
    "429": "too many wrong tokens; Retry-After says when to try again",
    "503": "the bus or the object store does not answer",
}


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _told(one)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Étude console", "version": "1"},
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


def _told(one: Operation) -> dict[str, Any]:
    names = [part[1:-1] for part in one.path.split("/") if part.startswith("{")]
    found: dict[str, Any] = {
        "summary": one.about,
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names),
            *({"name": name, "in": "query", "schema": schema} for name, schema in one.query.items()),
        ],
        "responses": {status: {"description": what} for status, what in _ANSWERS.items()},
    }
    if one.form is not None:
        form = {"type": "object", "properties": one.form}
        found["requestBody"] = {"content": {"application/x-www-form-urlencoded": {"schema": form}}}
    if one.acts:
        found["security"] = [{"token": []}]
    return found
