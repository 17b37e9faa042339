"""Decides which header fields pass between the sandbox and a server. Pure.

The proxy drops the fields that hold for one connection only. It adds the credential to a request. It blanks the value
of a response field that shows a credential.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.sandbox.contract import Credential

Headers = list[tuple[bytes, bytes]]
REMOVED = b"[removed]"
_SHORTEST = 6  # bytes of a part of a credential that is looked for: shorter ones occur by chance

# They hold for one connection (RFC 9110, 7.6.1). Alt-Svc offers ways around the proxy.
_HOP = frozenset(
    (
        *(b"connection", b"proxy-connection", b"keep-alive", b"te", b"trailer", b"upgrade", b"http2-settings"),
        *(b"proxy-authorization", b"proxy-authenticate", b"proxy-authentication-info", b"alt-svc"),
    )
)


def tokens(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> set[bytes]:
    """Return the comma-separated members of a field, in lower case."""
    return {token.strip().lower() for key, value in headers if key == name for token in value.split(b",")} - {b""}


def names(headers: Iterable[tuple[bytes, bytes]]) -> set[bytes]:
    return {name for name, _ in headers}


def request_headers(headers: Headers, host: bytes, credentials: Sequence[Credential], websocket: bool) -> Headers:
    """Return the fields of a request for the server. A credential replaces every field of its name.

    Fields that `Connection` names are dropped before a credential is added, so that no client can drop the credential or
    have it listed.
    """
    secret = {credential.header.lower().encode() for credential in credentials}
    gone = _HOP | tokens(headers, b"connection") | secret | {b"host", b"expect"}
    gone -= {b"content-length", b"transfer-encoding"}  # naming them in Connection must not change where the body ends
    kept = [(b"host", host), *((name, value) for name, value in headers if name not in gone)]
    kept += [(credential.header.encode(), credential.value.encode()) for credential in credentials]
    return kept + (
        [(b"connection", b"upgrade"), (b"upgrade", b"websocket")] if websocket else [(b"connection", b"close")]
    )


def response_headers(headers: Headers, credentials: Sequence[Credential]) -> Headers:
    """Return the fields of a response for the client. A field that shows a credential loses its value."""
    gone = (_HOP | tokens(headers, b"connection")) - {b"content-length"}
    if b"transfer-encoding" in names(headers):
        gone |= {b"transfer-encoding", b"content-length"}  # the proxy frames the body itself
    secrets = [part for credential in credentials for part in _parts(credential.value.encode())]
    return [
        (name, REMOVED if any(part in value for part in secrets) else value)
        for name, value in headers
        if name not in gone and not any(part.lower() in name for part in secrets)
    ]


def _parts(value: bytes) -> list[bytes]:
    """A credential and, of `Bearer TOKEN`, the token."""
    return [part for part in (value, value.split(b" ")[-1]) if len(part) >= _SHORTEST] or [value]
