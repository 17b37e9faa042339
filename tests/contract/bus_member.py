"""A member of a consumer group as a process of its own, for tests that kill it.

Usage: bus_member.py URL TOPIC GROUP MODE. Prints `ready`, then each key that it is given. MODE `done` acknowledges all,
`hold` acknowledges none, `odd` only messages whose `what` is an odd number, `publish` publishes 0, 1, … and prints what
became durable, `late` acknowledges what it holds when it gets SIGUSR1, and prints `acknowledged`.
"""

import asyncio
import itertools
import signal
import sys

from shared.bus import connect
from shared.contracts.messages import Alert
from shared.contracts.topics import Topic


def say(text: str) -> None:
    print(text, flush=True)


async def main(url: str, name: str, group: str, mode: str) -> None:
    topic = Topic(name, (Alert,), partitions=8)
    bus = connect(url, client="member")
    if mode == "publish":
        say("ready")
        for i in itertools.count():
            await bus.publish(topic, str(i % 3), Alert(run="r", name="n", severity="info", what=str(i)))
            say(str(i))
    deliveries = bus.deliveries([topic], group, max_in_flight=1000)
    held = []

    def acknowledge() -> None:
        for delivery in held:
            delivery.done()
        say("acknowledged")

    if mode == "late":
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, acknowledge)
    say("ready")
    async for delivery in deliveries:
        if mode == "done" or (mode == "odd" and int(delivery.message.what) % 2):
            delivery.done()
        held.append(delivery)
        say(delivery.message.what)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
