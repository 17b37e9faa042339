"""Who reads which partition. Pure: every member computes it from the same rows and only ever acts for itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import xxhash


@dataclass(frozen=True, slots=True)
class Change:
    """What one member does about one topic: `take` partitions that nobody holds, `release` what is beyond its share."""

    take: tuple[int, ...] = ()
    release: tuple[int, ...] = ()


def share(partitions: int, owners: Mapping[int, str], members: Collection[str], me: str) -> Change:
    """The next move of `me`. `owners`: partition -> live member that holds it (absent: free). `me` must be a member.

    Shares differ by one at most, and who holds more keeps the odd one, so that a rebalance moves as little as possible.
    When every member has moved until nobody changes anything, every partition has exactly one owner.
    """
    held: dict[str, int] = dict.fromkeys(members, 0)
    for owner in owners.values():
        if owner in held:
            held[owner] += 1
    each, odd = divmod(partitions, len(held))
    rank = sorted(held, key=lambda member: (-held[member], member)).index(me)
    quota = each + (1 if rank < odd else 0)
    mine = sorted(partition for partition, owner in owners.items() if owner == me)
    if len(mine) >= quota:
        return Change(release=tuple(mine[quota:]))
    free = [partition for partition in range(partitions) if owners.get(partition) not in held]
    return Change(take=tuple(free[: quota - len(mine)]))


def partition_of(key: str | bytes, partitions: int) -> int:
    """The partition of a key, the same in every adapter and process: xxh3 of its UTF-8 bytes (`key`: text, or these)."""
    return xxhash.xxh3_64_intdigest(key if isinstance(key, bytes) else key.encode()) % partitions
