"""What a run must be for the scheduler to take it up; whoever begins one asks the same before it is made. Pure."""

from __future__ import annotations

from shared.contracts.run import RunConfig

# What a message carries of a configuration, so that none grows too large for the bus (64 KiB): every message the run's name, a
# request its reward's, a step's the names of its groups (26 bytes each) and two figures of every version that sampled for them
# (55 bytes each). The trainer says that only when weights and checkpoint are written.
NAME_CHARS, GROUPS, STALENESS = 100, 1024, 128


def objections(config: RunConfig) -> list[str]:
    """What makes a run configuration impossible to schedule: field, what was found, what is allowed."""
    s = config.schedule
    names = (("run", config.run), ("reward.id", config.reward.id))
    allowed = f"1 to {NAME_CHARS} characters, so that the run's messages fit the bus"
    long = [f"{f}: found {len(n)} characters; allowed: {allowed}" for f, n in names if not 1 <= len(n) <= NAME_CHARS]
    rules = (
        ("group_size", s.group_size, 2 <= s.group_size <= 128, "2 to 128"),
        ("group_min", s.group_min, 2 <= s.group_min <= s.group_size, f"2 to group_size ({s.group_size})"),
        ("replacements", s.replacements, s.replacements >= 0, "0 or more"),
        ("groups_per_step", s.groups_per_step, 1 <= s.groups_per_step <= GROUPS, f"1 to {GROUPS}"),
        ("max_staleness", s.max_staleness, 0 <= s.max_staleness <= STALENESS, f"0 to {STALENESS}"),
        ("lease_s", s.lease_s, s.lease_s > 0, "more than 0"),
        ("max_steps", s.max_steps, s.max_steps >= 0, "0 (no limit) or more"),
        ("minutes", s.minutes, s.minutes >= 0, "0 (no limit) or more"),
        ("keep_versions", s.keep_versions, s.keep_versions >= 0, "0 (all stay) or more"),
        ("quota_gb", s.quota_gb, s.quota_gb >= 0, "0 (no quota) or more"),
    )
    return long + [f"schedule.{name}: found {found}; allowed: {fit}" for name, found, fine, fit in rules if not fine]
