"""Refusals of fields that a request may not hold, for every API that samples tokens for training. Pure.

Errors name the field, what was found and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

# SGLang's sampling fields that change the distribution, and the values that switch them off.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1, None),
    "top_k": (-1, 0, 1 << 30, None),
    "min_p": (0, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_new_tokens": (0, None),
    "logit_bias": (None, {}),
    "stop": (None, [], ""),
    "stop_regex": (None, [], ""),
    "regex": (None, ""),
    "json_schema": (None, ""),
    "ebnf": (None, ""),
    "structural_tag": (None, ""),
    "custom_params": (None, {}),
    "n": (1, None),
}
NESTED = "request body: nested too deeply to be read"
SLIP = 0.8  # how alike two names are where one is taken for a slip of the other: `store` is none of `stop`
MOST_SHOWN = 80  # characters of what was found; and nothing so long is the slip of a name
BIASED = "Only plain temperature sampling is served: anything else biases the importance ratios of training"


class BadRequest(ValueError):
    """The client's mistake; the text is for the client."""

    status = 400


def refuse_others(
    fields: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]], *, where: str = "", why: str = ""
) -> None:
    """Raises BadRequest for the first field with a value other than those that leave everything as it is."""
    for name, allowed in neutral.items():
        if name in fields and fields[name] not in allowed:
            found = repr(fields[name])[:MOST_SHOWN]
            raise BadRequest(f"{where}{name}: found {found}; allowed: {allowed[0]!r}{why and f'. {why}'}")


def refuse_unknown(fields: Mapping[str, Any], served: Iterable[str], taken: Iterable[str], *, where: str) -> None:
    """Raises BadRequest for the first field that is neither `served` nor `taken` (known, without effect): left out in silence,
    something else would be sampled than was asked for."""
    served, known = list(served), {*served, *taken}
    for name in fields:
        if name not in known:
            hint = f". Did you mean {like}?" if (like := _like(name, known)) else ""
            found = repr(fields[name])[:MOST_SHOWN]
            raise BadRequest(
                f"{where}{name[:MOST_SHOWN]}: found {found}, but no engine knows it; allowed: {', '.join(served)}{hint}"
            )


def refuse_slips(fields: Iterable[str], known: Iterable[str]) -> None:
    """Raises BadRequest for the first field that is none of the `known`, and almost one of them. Others are let pass: clients
    send much that has no part in what is sampled."""
    known = set(known)
    for name in fields:
        if name not in known and (like := _like(name, known, SLIP)):
            raise BadRequest(f"{name}: no field of this request. Did you mean {like}?")


def _like(name: str, known: Iterable[str], close: float = 0.6) -> str:
    """The nearest of the known names; "": none is near."""
    return next(iter(get_close_matches(name, sorted(known), 1, close)), "") if len(name) <= MOST_SHOWN else ""
