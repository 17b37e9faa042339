"""Messages of every topic, good and damaged, from a seed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from shared.contracts import codec
from shared.contracts.codec import MAX_BYTES, SCHEMA_HEADER, Raw
from shared.contracts.topics import Topic

INTEGERS = (0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1)  # columns of a database end at 2**63
TEXTS = ("", "r-1", "a" * 300, "héllo \u202e", "\x00", "null", "0", "{}")


def example(of: Any, random_: random.Random) -> Any:
    """A value of a type of the contracts, as msgspec describes it (`inspect.type_info`)."""
    match of:
        case inspect.StructType():
            return of.cls(**{f.name: example(f.type, random_) for f in of.fields})
        case inspect.UnionType():
            return example(random_.choice(of.types), random_)
        case inspect.LiteralType():
            return random_.choice(of.values)
        case inspect.EnumType():
            return random_.choice(list(of.cls))
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            return [example(of.item_type, random_) for _ in range(random_.randrange(3))]
        case inspect.TupleType():
            return tuple(example(item, random_) for item in of.item_types)
        case inspect.DictType():
            return {f"k{i}": example(of.value_type, random_) for i in range(random_.randrange(3))}
        case inspect.BoolType():
            return random_.random() < 0.5
        case inspect.IntType():
            least = -(2**70) if of.ge is None else of.ge
            most = 2**70 if of.le is None else of.le
            return min(max(random_.choice((*INTEGERS, random_.randrange(1000))), least), most)
        case inspect.FloatType():
            return random_.choice((0.0, -1.5, 1e300, random_.random()))
        case inspect.NoneType():
            return None
        case inspect.AnyType():
            return random_.choice((None, 1, "x", [1], {"a": 1}))
        case _:
            return random_.choice(TEXTS)


@cache  # to work it out costs several times what an example costs
def _described(kind: type) -> inspect.Type:
    return inspect.type_info(kind)


def good(topic: Topic, random_: random.Random) -> Raw:
    message = example(_described(random_.choice(topic.types)), random_)
    return Raw(*codec.encode(topic, message))


def _field(data: bytes, random_: random.Random, change: Callable[[dict[str, Any], str], None]) -> bytes:
    fields = json.loads(data)
    change(fields, random_.choice(list(fields)))
    return json.dumps(fields).encode()


def _huge(data: bytes, random_: random.Random) -> bytes:
    """Some integer of the message, wherever it stands, is one that no column and no 64-bit reader holds."""
    numbers = list(re.finditer(rb"(?<=[:,\[])-?[0-9]+(?=[,}\]])", data))
    if not numbers:
        return data
    one = random_.choice(numbers)
    return data[: one.start()] + str(random_.choice((2**63, 2**64, -(2**63) - 1, 10**400))).encode() + data[one.end() :]


def _wrong_type(data: bytes, random_: random.Random) -> bytes:
    value = random_.choice((None, 7, -1.5, "x", [], {}, [[[]]], True, "\ud800", 10**400))
    return _field(data, random_, lambda fields, name: fields.__setitem__(name, value))


def _spliced(data: bytes, random_: random.Random) -> bytes:
    at, upto = sorted(random_.randrange(len(data) + 1) for _ in range(2))
    return data[:at] + random_.randbytes(random_.randrange(12)) + data[upto:]


def _flipped(data: bytes, random_: random.Random) -> bytes:
    at = random_.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << random_.randrange(8))]) + data[at + 1 :]


DAMAGE: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    lambda data, r: data,  # good as it is
    lambda data, r: data[: r.randrange(len(data))],  # truncated
    _flipped,
    _spliced,
    _huge,
    _wrong_type,
    lambda data, r: _field(data, r, lambda fields, name: fields.pop(name)),
    lambda data, r: _field(data, r, lambda fields, name: fields.update(new_field=[1, {"deep": None}])),  # still good
    lambda data, r: data + data,
    lambda data, r: b"\xff\xfe" + data,
    lambda data, r: data.replace(b'"run":"', b'"run":"\xc3\x28', 1),  # bad UTF-8 where text is expected
    lambda data, r: b'{"a":' * r.randrange(1, 5000),  # a bomb of nesting
    lambda data, r: b'{"type":' + b"9" * r.randrange(1, 5000) + b"}",  # a number without end
    lambda data, r: b"[" + b"0," * r.randrange(1, 20_000) + b"0]",
    lambda data, r: b"",
    lambda data, r: r.randbytes(r.randrange(200)),
    lambda data, r: b" " * (MAX_BYTES - 1),
)
SCHEMAS = ("{}/2.0", "{}/0.1", "{}/1.99", "{}", "", "{}/x.y", "1.0", "{}/1", "{}/-1.0", "{}/" + "9" * 500, "é/1.0\x00")


def fuzzed(topic: Topic, count: int, seed: int) -> Iterator[Raw]:
    """None is larger than a producer sends: what is larger never gets into a log."""
    random_ = random.Random(f"{topic.name} {seed}")
    for _ in range(count):
        one = good(topic, random_)
        data, headers = random_.choice(DAMAGE)(one.data, random_), dict(one.headers)
        if random_.random() < 0.1:
            headers[SCHEMA_HEADER] = random_.choice(SCHEMAS).format(topic.name)
        if random_.random() < 0.02:
            headers = {}
        yield Raw(data[:MAX_BYTES], headers)


def readable(topic: Topic, raw: Raw) -> bool:
    """By the codec's word. Whatever else it raises is a defect, and comes through."""
    try:
        message = codec.decode(topic, raw.data, raw.headers)
    except codec.UnreadableMessage as why:
        if not str(why):
            raise
        return False
    assert isinstance(message, topic.types)
    msgspec.json.encode(message)
    return True
