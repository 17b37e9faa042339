"""`etude dlq`: what no service could read or use, why, and the way back once the cause is mended.

The dead letters of a topic are a topic themselves. Being replayed is acknowledging, in a consumer group of its own: a
letter is put back once, however often and from wherever `replay` is called (again only where one was ended in the middle).
Each stays for a year, put back or not.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import replace as changed
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from etude.hearing import silent
from shared import bus as buses
from shared.bus import Bus, BusUnavailable, Delivery, dead_letters
from shared.contracts.codec import MessageTooLarge, Raw
from shared.contracts.topics import RUNS_STATE, TOPICS, Topic
from shared.settings import ServiceSettings, Told, read
from shared.visible import visible

REPLAYED = "dlq.replayed"  # the group whose position says what was put back
NOBODY = "dlq.nobody"  # a group that acknowledges nothing: its lag counts every letter that is kept
OURS = ("dead-letter-reason", "dead-letter-source", "dead-letter-cut")
AT_A_TIME = 256
SHOWN_BYTES = 2000
LOOK_S = 1.0  # without a letter: is any left?
OTHERS_S = 45.0  # of a replay that gets none: longer than a dead one's letters wait for the next, on any bus

T = TypeVar("T")
State = Annotated[Path, typer.Option("--state", help="Directory for everything local.", envvar="ETUDE_STATE")]
Name = Annotated[str, typer.Argument(help="The topic whose dead letters are meant, e.g. rollouts.finished.")]
Offset = Annotated[int, typer.Option(help="Only the letter at this place (`show` prints it); -1: all.")]

app = typer.Typer(no_args_is_help=True, help="Messages that no service could read or use: look at them, put them back.")
console = Console()


@app.command(name="list")
def list_(state: State = Path(".etude")) -> None:
    """How many dead letters every topic has, and how many of them were never put back."""

    async def counted(bus: Bus) -> list[tuple[str, int, int]]:
        letters = [dead_letters(topic) for topic in TOPICS.values()]
        kept, left = await bus.lag(letters, NOBODY), await bus.lag(letters, REPLAYED)
        return [(topic.name, kept[topic.dead_letter], left[topic.dead_letter]) for topic in TOPICS.values()]

    table = Table("topic", "dead letters", "never put back")
    for name, kept, left in _with_bus(state, counted) or []:
        if kept:
            table.add_row(name, str(kept), str(left))
    console.print(table if table.row_count else "No dead letters.")


@app.command()
def show(name: Name, state: State = Path(".etude"), offset: Offset = -1) -> None:
    """Print the dead letters of a topic: place, reason, where it came from, headers, bytes."""
    topic = _topic(name)

    async def printed(bus: Bus) -> int:
        count = 0
        async for letter in _kept(bus, topic):
            if offset in (-1, letter.offset):
                _print(letter)
                count += 1
        return count

    if not _with_bus(state, printed):
        console.print(f"{name}: no dead letter{'' if offset < 0 else f' at {offset}'}.")


class Elsewhere(Told, RuntimeError):
    """Letters are left, and another replay holds them."""


@app.command()
def replay(name: Name, state: State = Path(".etude"), offset: Offset = -1) -> None:
    """Put dead letters back into their topic, byte for byte: all that never were, or the one at --offset (again)."""
    topic = _topic(name)
    if topic is RUNS_STATE:  # an old status would be the last of its run, and what compaction leaves
        raise typer.BadParameter(
            f"{name}: only the scheduler writes it, and says at its start how every open run stands"
        )
    put_back = _with_bus(state, lambda bus: _replay_one(bus, topic, offset) if offset >= 0 else _replay_all(bus, topic))
    count = put_back or 0
    console.print(f"{name}: {count} put back.")
    if offset >= 0 and not count:
        raise typer.Exit(1)


def original(letter: Raw) -> Raw:
    """The message as it was before it was buried."""
    return Raw(letter.data, {name: value for name, value in letter.headers.items() if name not in OURS})


def as_raw(topic: Topic) -> Topic:
    """The same topic, for bytes as they are."""
    return changed(topic, types=(Raw,))


async def _replay_all(bus: Bus, topic: Topic) -> int:
    """As many as are left at its start. Raises Elsewhere."""
    letters = dead_letters(topic)
    left = (await bus.lag([letters], REPLAYED))[letters.name]
    deliveries = bus.deliveries([letters], REPLAYED, AT_A_TIME)
    replayed = 0
    for _ in range(left):
        letter = await _next(bus, letters, deliveries)
        if letter is None:
            typer.echo(f"{topic.name}: another replay put the rest back meanwhile.", err=True)
            break
        try:
            await _put_back(bus, topic, letter)
            replayed += 1
        except MessageTooLarge as error:  # it stays among the dead letters, as all do
            typer.echo(f"{letter.offset}: left out: {error}", err=True)
        letter.done()
    return replayed


async def _next(bus: Bus, letters: Topic, deliveries: AsyncIterator[Delivery]) -> Delivery | None:
    """None: nothing is left, another replay had the rest. Raises Elsewhere when another has it and does not go on."""
    fewest, until = sys.maxsize, time.monotonic() + OTHERS_S
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                return await anext(deliveries)
        try:
            left = (await bus.lag([letters], REPLAYED))[letters.name]
        except BusUnavailable:  # for a moment, while two replays are about to share the letters
            if time.monotonic() > until:
                raise
            continue
        if left == 0:
            return None
        if left < fewest:
            fewest, until = left, time.monotonic() + OTHERS_S
        elif time.monotonic() > until:
            raise Elsewhere(
                f"{letters.name}: {left} letters are left, and another `etude dlq replay` holds them: wait for its end, "
                "or end it and call this again"
            )


async def _replay_one(bus: Bus, topic: Topic, offset: int) -> int:
    async for letter in _kept(bus, topic):
        if letter.offset == offset:
            await _put_back(bus, topic, letter)
            return 1
    return 0


async def _put_back(bus: Bus, topic: Topic, letter: Delivery) -> None:
    """Raises MessageTooLarge, also for what was too large to be kept whole: the rest of it is another message."""
    if cut := letter.message.headers.get(OURS[2]):
        raise MessageTooLarge(f"it was cut; it had {cut}")
    await bus.publish(as_raw(topic), letter.key, original(letter.message))


async def _kept(bus: Bus, topic: Topic) -> AsyncIterator[Delivery]:
    """Every dead letter that is there now, oldest first."""
    letters = dead_letters(topic)
    count = (await bus.lag([letters], NOBODY))[letters.name]
    deliveries = bus.deliveries([letters], None, AT_A_TIME)
    for _ in range(count):
        letter = await anext(deliveries)
        letter.done()
        yield letter


def _print(letter: Delivery) -> None:
    headers = letter.message.headers
    console.print(f"[bold]{letter.offset}[/]  key {escape(visible(letter.key))}", highlight=False)
    console.print(f"  reason: {visible(headers.get(OURS[0], ''))}", highlight=False, markup=False)
    console.print(f"  source: {visible(headers.get(OURS[1], ''))}", highlight=False, markup=False)
    console.print(f"  headers: {original(letter.message).headers}", highlight=False, markup=False)
    data = letter.message.data
    more = f" … ({len(data)} bytes)" if len(data) > SHOWN_BYTES else ""
    text = visible(data[:SHOWN_BYTES].decode("utf-8", "backslashreplace"))
    console.print(f"  {text}{more}", highlight=False, markup=False)


def _topic(name: str) -> Topic:
    if name not in TOPICS:
        raise typer.BadParameter(f"found {name!r}; allowed: {', '.join(sorted(TOPICS))}")
    return TOPICS[name]


def _with_bus(state: Path, work: Callable[[Bus], Awaitable[T]]) -> T | None:
    """What comes of the work; None where nobody has used this bus yet. Ends the command with a text and exit code 1 when
    the bus cannot be used."""
    try:
        settings = read(ServiceSettings, state=state)
        return None if silent(settings) else asyncio.run(_run(settings, work))
    except (Told, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


async def _run(settings: ServiceSettings, work: Callable[[Bus], Awaitable[T]]) -> T:
    bus = buses.connect(settings.bus_url, client="etude-dlq")
    try:
        return await work(bus)
    finally:
        await bus.close()
