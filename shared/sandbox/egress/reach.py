"""Looks names up and opens connections: the outside half of the proxy.

A connection goes to an address that was checked, not to a name: a second look-up could give another address.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shared.sandbox.egress import policy

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]  # name, port -> addresses
Forbidden = Callable[[policy.Address], str | None]  # why an address may not be reached; None: it may
_MOST_ADDRESSES = 8
# Threads of their own: a name that is slow to look up must not hold up the worker's other work.
_LOOKUPS = ThreadPoolExecutor(16, "egress-lookup")
_NOBODYS = {4: "192.0.2.1", 6: "2001:db8::1"}  # addresses for documentation


async def system_resolve(host: str, port: int) -> list[str]:
    """Return the addresses that this machine's resolver gives. Raises OSError."""
    # The dot: the name is complete, so the resolver tries no search domain of the worker's network.
    look_up = functools.partial(socket.getaddrinfo, host + ".", port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_LOOKUPS, look_up)
    return list(dict.fromkeys(str(where[0]) for *_, where in found))


def forbidden_here(address: policy.Address) -> str | None:
    """`policy.forbidden`, and this machine's own addresses, which may be public."""
    return policy.forbidden(address) or ("this machine's own address" if _own(address) else None)


def _own(address: policy.Address) -> bool:
    # Sends nothing: a UDP socket that connects only asks which address packets would come from.
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect((str(address), 9))
            if asked.getsockname()[0] == str(address):
                return True
    except OSError:
        pass  # no route to it
    # Under net.ipv4.ip_nonlocal_bind every address can be bound.
    return _binds(family, str(address)) and not _binds(family, _NOBODYS[address.version])


def _binds(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as bound:
            bound.bind((address, 0))
    except OSError:
        return False
    return True


def checked(found: Sequence[str], forbidden: Forbidden) -> tuple[str, ...]:
    """Return the addresses, of which every one may be reached. Raises Refused.

    One forbidden address refuses all: a name with a public and a private address is a trap.
    """
    if not found:
        raise policy.Refused("the name has no address", 502)
    for text in found:
        try:
            why = forbidden(ipaddress.ip_address(text))
        except ValueError:
            why = "no IP address"
        if why:
            raise policy.Refused(f"the name leads to {text:.60}, {why}")
    return tuple(str(ipaddress.ip_address(text)) for text in found[:_MOST_ADDRESSES])


async def connect(
    addresses: Sequence[str], port: int, limit_s: float, tls: ssl.SSLContext | None = None, host: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address that answers. Raises OSError of the last one (TimeoutError, ssl.SSLError among them)."""
    failed: OSError = ConnectionError("no address")
    for address in addresses:
        try:
            async with asyncio.timeout(limit_s):
                return await asyncio.open_connection(
                    address, port, ssl=tls, server_hostname=host if tls else None, limit=1 << 16
                )
        except ssl.SSLError:
            raise
        except OSError as error:
            failed = error
    raise failed


@functools.cache
def system_trust() -> ssl.SSLContext:
    """Return TLS settings that trust what this machine trusts. Made once: reading all the authorities takes a while."""
    return ssl.create_default_context()


@functools.cache
def system_certificates() -> bytes:
    """Return the authorities that this machine trusts, as PEM; empty where it has no such file."""
    file = ssl.get_default_verify_paths().cafile
    return Path(file).read_bytes() if file else b""
