"""Do the servers that the settings name answer, and do they let us in? Asked before services start, by `etude up`, the
demo and `etude doctor`: a wrong address would otherwise show as nine services that wait.

Embedded adapters are not asked: they make what they need. Each server has `WITHIN_S` to answer.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shared.settings import ServiceSettings, masked

WITHIN_S = 14.0

Check = Callable[[], str]
"""Returns in words what answers. Raises with a text that names the setting, what was found and what to do."""


def checks(settings: ServiceSettings) -> dict[str, Check]:
    """One for each real server."""
    found: dict[str, Check] = {}
    if settings.bus_url.startswith("kafka:"):
        found["bus"] = lambda: _bus(settings.bus_url)
    if settings.ledger_url.startswith("postgresql"):
        found["ledger"] = lambda: _ledger(settings.ledger_url)
    if settings.objects_url.startswith("s3:"):
        found["objects"] = lambda: _objects(settings.objects_url)
    if settings.jobs_url.startswith("redis"):
        found["jobs"] = lambda: _jobs(settings.jobs_url)
    return found


def ask(settings: ServiceSettings) -> dict[str, tuple[bool, str]]:
    """Every check at once: by what it concerns, whether it passed, and its words."""
    named = checks(settings)
    if not named:
        return {}
    pool = ThreadPoolExecutor(len(named), thread_name_prefix="reach")
    try:
        answers = {what: pool.submit(_words, what, check) for what, check in named.items()}
        results = {}
        for what, answer in answers.items():
            try:
                results[what] = answer.result(WITHIN_S)
            except TimeoutError:
                results[what] = (
                    False,
                    f"{what} (ETUDE_{what.upper()}): no answer within {WITHIN_S:.0f} s; does it hang?",
                )
        return results
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _words(what: str, check: Check) -> tuple[bool, str]:
    try:
        return True, check()
    except (OSError, ValueError, RuntimeError) as error:  # what the adapters raise: their texts are meant for people
        return False, str(error)
    except Exception as error:  # what their clients raise and they did not expect: no reason to end in a stack trace
        return False, f"{what} (ETUDE_{what.upper()}): {type(error).__name__}: {masked(str(error))}"


def _bus(url: str) -> str:
    from shared.bus.kafka_admin import reach

    return f"Kafka, {reach(url)}"


def _ledger(url: str) -> str:
    from shared import ledger

    engine = ledger.connect(url)
    try:
        return f"PostgreSQL, migration {ledger.reach(engine) or 'none yet'}"
    finally:
        engine.dispose()


def _objects(url: str) -> str:
    from shared import objects

    store, key = objects.connect(url), f"reach/{uuid.uuid4().hex}"
    next(store.list("runs/"), None)
    try:
        store.put_if_absent(key, b"does it refuse a second object under this key?")
        store.get(store.put(key, b"may this access key write, read and delete?"))
    finally:
        store.delete(key)
    return "S3"


def _jobs(url: str) -> str:
    from redis import Redis
    from redis.exceptions import AuthenticationError, RedisError

    try:
        with Redis.from_url(url, socket_connect_timeout=5, socket_timeout=5) as client:
            client.ping()
            role = _role(client)
    except (AuthenticationError, RedisError) as error:
        raise ConnectionError(
            f"jobs (ETUDE_JOBS): {masked(url)}: {error}. Is the address right, does Redis run there, and is the password its own?"
        ) from None
    if role == "slave":
        raise ConnectionError(
            f"jobs (ETUDE_JOBS): {masked(url)}: this Redis is a replica and refuses every job; name the primary, or an "
            "address that follows it"
        )
    return "Redis"


def _role(client: Any) -> str:
    """Return `master` or `slave`; an empty text where this user may not ask."""
    from redis.exceptions import ResponseError

    try:
        return str(client.info("replication").get("role", ""))
    except ResponseError:
        return ""
