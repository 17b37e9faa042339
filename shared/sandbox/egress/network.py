"""Reads a problem's field `network` and a worker's credentials, and writes decisions for the trajectory.

A problem names credentials; the worker's operator says what they are and which host gets them. A problem that came from
somebody else can therefore send no secret to a host of its choice.

    "none"
    ["pypi.org", "files.pythonhosted.org:443", "*.example.org"]
    {"allow": ["index.example.org:443"], "credentials": ["index"]}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from shared.sandbox.contract import NO_NETWORK, Credential, Decision, Network
from shared.sandbox.egress import policy

_MOST_RULES = 1000
_FORMS = "'none', a list of hosts, or an object with 'allow' and 'credentials'"
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,8190}[\x21-\x7e])?")
# They say how a message is framed and where it goes: a credential there would change the request itself.
_NO_CREDENTIALS = frozenset(
    ("host", "content-length", "transfer-encoding", "connection", "upgrade", "expect", "te", "trailer", "keep-alive")
)


def parse(found: Any, known: Mapping[str, Credential] | None = None) -> Network:
    """Return the policy that a problem's field asks for. `known`: the worker's credentials by name; None: it has none.

    Raises ValueError that names the field, what was found and what is allowed.
    """
    if found is None or found == "none":
        return NO_NETWORK
    if isinstance(found, list):
        found = {"allow": found}
    if not isinstance(found, dict):
        raise ValueError(f"field 'network': found {found!r:.100}; allowed: {_FORMS}")
    if odd := sorted(map(str, set(found) - {"allow", "credentials"})):
        raise ValueError(f"field 'network': found the key {odd[0]!r:.100}; allowed: 'allow', 'credentials'")
    allow = _texts(found.get("allow", []), "network.allow", "a list of texts")
    names = _texts(found.get("credentials", []), "network.credentials", "a list of names")
    rules = []
    for i, text in enumerate(allow):
        try:
            rules.append(policy.rule(text))
        except ValueError as error:
            raise ValueError(f"field 'network.allow[{i}]': {error}") from None
    credentials = []
    for i, name in enumerate(names):
        field = f"network.credentials[{i}]"
        if (credential := (known or {}).get(name)) is None:
            have = ", ".join(map(repr, sorted(known or {}))) or "none: this worker has no credentials"
            raise ValueError(f"field {field!r}: found {name!r:.100}; allowed: {have}")
        if not any(_covers(rule, credential.host) for rule in rules):
            raise ValueError(
                f"field {field!r}: found {name!r}, which is for {credential.host}; allowed: credentials of a host in 'allow'"
            )
        credentials.append(credential)
    return Network(tuple(allow), tuple(credentials))


def parse_credentials(text: str | bytes) -> dict[str, Credential]:
    """Read a worker's credentials: a JSON object, name -> {"host": …, "header": …, "value": …}.

    Raises ValueError that names the field and never shows a value.
    """
    allowed = 'allowed: {"NAME": {"host": "index.example.org", "header": "Authorization", "value": "…"}}'
    try:
        found = msgspec.json.decode(text)
    except msgspec.DecodeError:  # its text may quote a part of a value
        raise ValueError(f"credentials: found no JSON; {allowed}") from None
    if not isinstance(found, dict):
        raise ValueError(f"credentials: found {type(found).__name__}; {allowed}")
    read = {}
    for name, fields in found.items():
        if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
            raise ValueError(f"credentials: field {name!r:.100}: found no object of texts; {allowed}")
        if set(fields) != {"host", "header", "value"}:
            raise ValueError(f"credentials: field {name!r:.100}: found the keys {sorted(fields)!r:.200}; {allowed}")
        try:
            read[name] = check(Credential(**fields))
        except ValueError as error:
            raise ValueError(f"credentials: field {name!r:.100}: {error}") from None
    return read


def check(credential: Credential) -> Credential:
    """Return the credential with its host in the one spelling. Raises ValueError, which never shows the value."""
    try:
        host = policy.hostname(credential.host)
    except ValueError as error:
        raise ValueError(f"field 'host': found {credential.host!r:.100} ({error}); allowed: a host name") from None
    if not _TOKEN.fullmatch(credential.header) or credential.header.lower() in _NO_CREDENTIALS:
        raise ValueError(f"field 'header': found {credential.header!r:.100}; allowed: the name of a header field")
    if not _VALUE.fullmatch(credential.value):
        raise ValueError("field 'value': found a text that is no header value; allowed: printable ASCII")
    return Credential(host, credential.header, credential.value)


def to_json(decisions: Iterable[Decision]) -> str:
    """Return decisions as a JSON array, in their order: the form that a trajectory holds."""
    return msgspec.json.encode(list(decisions)).decode()


def from_json(text: str) -> tuple[Decision, ...]:
    """Inverse of `to_json`. Raises ValueError."""
    try:
        return tuple(msgspec.json.decode(text, type=list[Decision]))
    except msgspec.DecodeError as error:
        raise ValueError(f"not a list of decisions: {error}") from None


def _texts(found: Any, field: str, allowed: str) -> list[str]:
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError(f"field {field!r}: found {found!r:.100}; allowed: {allowed}")
    if len(found) > _MOST_RULES:
        raise ValueError(f"field {field!r}: found {len(found)} entries; allowed: at most {_MOST_RULES}")
    return found


def _covers(rule: policy.Rule, host: str) -> bool:
    return rule.permits(host, policy.DEFAULT_PORTS[0] if rule.port is None else rule.port)
