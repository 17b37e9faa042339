"""What one sandbox may use of the network, and what it has used."""

from __future__ import annotations

from dataclasses import dataclass

from shared.sandbox.egress.policy import Refused


@dataclass(frozen=True, slots=True)
class EgressLimits:
    """Limits of one sandbox. `head_s`: from the first byte of a request's head, or of a TLS handshake, to its last.
    `idle_s`: without a byte in either direction. `seconds`: of one connection."""

    bytes_up: int = 256 << 20
    bytes_down: int = 4 << 30
    connections: int = 64  # at once
    requests: int = 10_000  # also those that were refused; each is a decision in the trajectory
    head_bytes: int = 32 << 10
    head_s: float = 15.0
    connect_s: float = 15.0  # of one address, with its TLS handshake
    idle_s: float = 300.0  # a model's answer may take minutes
    seconds: float = 3600.0


class Used:
    """Counts bytes against the limits. Raises Refused past one."""

    def __init__(self, limits: EgressLimits) -> None:
        self._limits = limits
        self.bytes_up = self.bytes_down = 0

    def up(self, count: int) -> None:
        self.bytes_up += count
        if self.bytes_up > self._limits.bytes_up:
            raise Refused(f"over the limit bytes_up: more than {self._limits.bytes_up} bytes sent", 429)

    def down(self, count: int) -> None:
        self.bytes_down += count
        if self.bytes_down > self._limits.bytes_down:
            raise Refused(f"over the limit bytes_down: more than {self._limits.bytes_down} bytes received", 429)
