"""Reads the plain part of a TLS handshake: which server a client asks for. Pure.

Everything that is unusual raises ValueError: a name that the proxy reads differently from the server would be a way out.
"""

from __future__ import annotations

MOST_BYTES = 16 << 10  # of a ClientHello with its record headers; usual ones have 0.3 to 2 KiB
# Usual ones take one record. Without a bound, a client that sends byte by byte would have thousands read again for each byte.
MOST_RECORDS = 4
ACCESS_DENIED = bytes((21, 3, 3, 0, 2, 2, 49))  # a fatal alert, so that the client can say why
HANDSHAKE = 22
_PLAIN = (20, 21, HANDSHAKE, 23)
_SERVER_NAME = 0
_HIDDEN = (0xFE0D, 0xFFCE)  # Encrypted ClientHello, and its draft: the name outside is not the name that counts
# RFC 8446, 4.1.3: a ServerHello with this random asks for a second ClientHello, which could name another server.
_RETRY = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise ValueError("a broken ClientHello")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def block(self, size: int) -> _Reader:
        """A part whose length stands before it, in `size` bytes."""
        return _Reader(self.take(self.number(size)))


def record_size(data: bytes) -> int | None:
    """Return the size of the record that the data begin with, or None if too little is there. Raises ValueError."""
    if data and data[0] not in _PLAIN:
        raise ValueError("not TLS")
    if len(data) < 5:
        return None
    size = int.from_bytes(data[3:5], "big")
    if data[1] != 3 or not 0 < size <= (1 << 14) + 256:
        raise ValueError("not TLS")
    return 5 + size


def client_hello(data: bytes) -> tuple[str, int] | None:
    """Return the server name of the ClientHello at the beginning, and how many bytes it takes. None: it is not complete.

    Raises ValueError where it is broken, names no server or several, or hides the name.
    """
    message, at = b"", 0
    for _ in range(MOST_RECORDS):
        if len(data) - at > 0 and data[at] != HANDSHAKE:
            raise ValueError("not a TLS ClientHello")
        size = record_size(data[at:])
        if size is None or len(data) < at + size:
            if len(data) > MOST_BYTES:
                raise ValueError(f"a ClientHello of more than {MOST_BYTES} bytes")
            return None
        message += data[at + 5 : at + size]
        at += size
        if message[0] != 1:
            raise ValueError("not a TLS ClientHello")
        if len(message) >= 4 and len(message) >= (whole := 4 + int.from_bytes(message[1:4], "big")):
            if len(message) > whole:
                raise ValueError("a ClientHello with more behind it")
            return _server_name(message[4:]), at
    raise ValueError(f"a ClientHello in more than {MOST_RECORDS} records")


def _server_name(body: bytes) -> str:
    reader = _Reader(body)
    reader.take(2 + 32)  # version, random
    reader.block(1)  # session
    reader.block(2)  # cipher suites
    reader.block(1)  # compression
    extensions: dict[int, _Reader] = {}
    block = reader.block(2) if reader.left else _Reader(b"")
    while block.left:
        kind = block.number(2)
        if kind in extensions:
            raise ValueError("a ClientHello with an extension twice")
        extensions[kind] = block.block(2)
    if reader.left:
        raise ValueError("a broken ClientHello")
    if any(kind in extensions for kind in _HIDDEN):
        raise ValueError("an encrypted ClientHello; allowed: one whose server name can be read")
    if _SERVER_NAME not in extensions:
        raise ValueError("a ClientHello without a server name")
    names = extensions[_SERVER_NAME].block(2)
    if names.number(1) != 0:
        raise ValueError("a broken ClientHello")
    name = names.block(2)
    if names.left or extensions[_SERVER_NAME].left:
        raise ValueError("a ClientHello with several server names")
    try:
        return name.take(name.left).decode("ascii").lower()
    except UnicodeDecodeError:
        raise ValueError("a ClientHello whose server name is not ASCII") from None


def asks_again(data: bytes) -> bool | None:
    """Return whether a server's first record asks for a second ClientHello, or None if too little is there.

    Raises ValueError where that cannot be read.
    """
    size = record_size(data)
    if size is None or len(data) < size:
        return None
    if data[0] != HANDSHAKE:
        return False  # an alert
    if size < 5 + 4 + 2 + 32 or data[5] != 2:
        raise ValueError("a broken ServerHello")
    return data[11:43] == _RETRY
