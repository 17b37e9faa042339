"""Decides which host names and addresses a sandbox may reach. Pure: no look-up, no socket.

Invariants:
- A host is a name in one spelling: lower case, ASCII (IDNA), no trailing dot. No spelling of an IP address is a name.
- An address is reachable only if it is a public unicast address. An IPv6 address that carries an IPv4 address is judged by
  the latter, or refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

import idna

DEFAULT_PORTS = (80, 443)
SPELLINGS = "'name', 'name:port' or '*.name', where a name is no IP address"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
# inet_aton reads 127.1, 0177.0.0.1, 0x7f.1 and 2130706433. Every spelling that it accepts ends in a number.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[0-9]{1,5}")


class Refused(Exception):
    """The policy or a limit forbids a request. `status`: the HTTP status that the client gets."""

    def __init__(self, why: str, status: int = 403) -> None:
        super().__init__(why)
        self.why, self.status = why, status


def hostname(text: str) -> str:
    """Return the one spelling of a host name. Raises ValueError for an IP address and for what is no name."""
    name = text
    if not text.isascii():
        try:
            name = idna.encode(text, uts46=True).decode("ascii")
        except (idna.IDNAError, UnicodeError) as error:
            raise ValueError(f"not a host name: {error}") from None
    name = name.lower().removesuffix(".")
    if any(character in name for character in ":[]%"):
        raise ValueError("an IP address or a port; names only")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        raise ValueError("an IP address; names only")
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError("not a host name")
    return name


def port_number(text: str) -> int:
    """Raises ValueError for anything but 1 to 65535 in decimal digits."""
    if not text.isascii() or not _PORT.fullmatch(text) or not 1 <= int(text) <= 65535:
        raise ValueError("not a port; allowed: 1 to 65535")
    return int(text)


def authority(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Read `host:port`, or `host` where there is a default port. Raises ValueError; user information is refused."""
    host, colon, port = text.rpartition(":")
    if not colon and default_port is not None:
        return hostname(text), default_port
    return hostname(host), port_number(port)


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of an allow list. `below`: the names below `name`, at any depth, instead of `name` itself. `port`: None: the
    default ports."""

    text: str
    name: str
    port: int | None
    below: bool

    def permits(self, host: str, port: int) -> bool:
        fits = host.endswith("." + self.name) if self.below else host == self.name
        return fits and (port in DEFAULT_PORTS if self.port is None else port == self.port)


def rule(text: str) -> Rule:
    """Read one entry of an allow list. Raises ValueError with what is allowed."""
    try:
        if text.startswith("*."):
            name = hostname(text[2:])
            if "." not in name:
                raise ValueError("a whole top-level domain")
            return Rule(text, name, None, True)
        host, colon, port = text.rpartition(":")
        if colon:
            return Rule(text, hostname(host), port_number(port), False)
        return Rule(text, hostname(text), None, False)
    except ValueError as error:
        raise ValueError(f"found {text!r:.100} ({error}); allowed: {SPELLINGS}") from None


class Policy:
    """An allow list. Everything that no rule permits is refused."""

    def __init__(self, allow: Iterable[str]) -> None:
        self._rules = tuple(rule(text) for text in allow)

    def permit(self, host: str, port: int) -> Rule:
        """Return the first rule that permits the host, which `hostname` has spelled. Raises Refused."""
        for one in self._rules:
            if one.permits(host, port):
                return one
        if any(one.permits(host, one.port or DEFAULT_PORTS[0]) for one in self._rules):
            raise Refused(f"port {port} is not in the allow list for this host")
        raise Refused("the host is not in the allow list")


# The IANA registries of special-purpose addresses, and addresses by which clouds tell a machine who it is. The library's own
# list (`is_global`) differs between releases of Python.
_METADATA = ("169.254.169.254/32", "169.254.170.2/32", "168.63.129.16/32", "100.100.100.200/32", "192.0.0.192/32")
_METADATA_6 = ("fd00:ec2::/32", "fd20:ce::/32")
_FORBIDDEN = {
    "metadata": (*_METADATA, *_METADATA_6),
    "unspecified": ("0.0.0.0/8", "::/128"),
    "loopback": ("127.0.0.0/8", "::1/128"),
    "link-local": ("169.254.0.0/16", "fe80::/10"),
    "private": ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7", "fec0::/10"),
    "multicast": ("224.0.0.0/4", "ff00::/8"),
    "reserved": (
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
        *("240.0.0.0/4", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
    ),
}
_NETWORKS = tuple((kind, ipaddress.ip_network(text)) for kind, texts in _FORBIDDEN.items() for text in texts)
_PUBLIC_6 = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # what a network without IPv4 shows of the IPv4 internet


def forbidden(address: Address) -> str | None:
    """Return why an address may not be reached, or None if it may."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            return "a link-local address"
        if address in _NAT64 or address.ipv4_mapped is not None:
            return forbidden(ipaddress.IPv4Address(address.packed[-4:]))
    for kind, network in _NETWORKS:
        if address.version == network.version and address in network:
            return f"a {kind} address"
    if isinstance(address, ipaddress.IPv6Address) and address not in _PUBLIC_6:
        return "a reserved address"
    return None
