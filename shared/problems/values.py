"""Values of tests as text: tagged JSON of plain Python types, and what may be asked of it without rebuilding the value.

| Python | JSON |
|---|---|
| None, bool, str, int below 2^53, finite float | itself; a float always has a point or an exponent |
| int from 2^53 on | `{"int": "-0x1f…"}` |
| nan, inf, -inf | `{"float": "nan"}` |
| str with surrogates | `{"str": [code points]}` |
| bytes | `{"bytes": "hex"}` |
| list | `[…]` |
| tuple, set, frozenset | `{"tuple": […]}`, `{"set": […]}`, `{"frozenset": […]}` |
| dict | `{"dict": [[key, value], …]}`, in insertion order |

Invariants:
- `encode` is canonical: one value, one ASCII text, whatever the hash seed (set members are sorted).
- Comparison is type-exact: 1, True and 1.0 are three values; so are 0.0 and -0.0; nan equals nan. Dicts compare without
  regard to order, as in Python.
- `equal` and `show` never build a set or a dict from the text, so that hostile text cannot exploit hash collisions; all
  functions bound depth and size.

Standard library only: the sandbox's harness carries this file into the sandbox (shared/sandbox).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from json.encoder import encode_basestring_ascii as _quote
from typing import Any, NoReturn

MAX_DEPTH = 32
MAX_NODES = 100_000
MAX_TEXT = 1 << 20  # characters
MAX_ITEMS = 64  # taken from an iterator: endless generators are legal results
_PLAIN_INT = 1 << 53  # beyond it, JSON readers of other languages lose digits

_DICT_VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))


def encode(value: Any) -> str:
    """The canonical text. ValueError for a type that is not plain, for cycles and for what exceeds the limits."""
    text = _encode(value, 0, [MAX_NODES])
    if len(text) > MAX_TEXT:
        raise ValueError(f"value of {len(text)} characters as text; at most {MAX_TEXT}")
    return text


def _encode(value: Any, depth: int, budget: list[int]) -> str:
    kind = type(value)
    if value is None:
        return "null"
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        if -_PLAIN_INT < value < _PLAIN_INT:
            return int.__repr__(value)
        if value.bit_length() > 4 * MAX_TEXT:
            raise ValueError(f"int of {value.bit_length()} bits; at most {4 * MAX_TEXT}")
        return f'{{"int": "{hex(value)}"}}'
    if kind is str:
        if len(value) > MAX_TEXT:
            raise ValueError(f"str of {len(value)} characters; at most {MAX_TEXT}")
        if _has_surrogates(value):
            return f'{{"str": [{", ".join(str(ord(c)) for c in value)}]}}'
        return _quote(value)
    if kind is float:
        text = float.__repr__(value)
        return f'{{"float": "{text}"}}' if text in ("nan", "inf", "-inf") else text
    if kind is bytes:
        if len(value) > MAX_TEXT:
            raise ValueError(f"{len(value)} bytes; at most {MAX_TEXT}")
        return f'{{"bytes": "{value.hex()}"}}'
    if kind not in (list, tuple, dict, set, frozenset):
        raise ValueError(f"{kind.__name__} is not a plain type")
    if depth >= MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}, or cyclic")
    budget[0] -= len(value)
    if budget[0] < 0:
        raise ValueError(f"more than {MAX_NODES} elements")
    depth += 1
    if kind is list:
        return f"[{', '.join([_encode(v, depth, budget) for v in value])}]"
    if kind is tuple:
        return f'{{"tuple": [{", ".join([_encode(v, depth, budget) for v in value])}]}}'
    if kind is dict:
        pairs = [f"[{_encode(k, depth, budget)}, {_encode(v, depth, budget)}]" for k, v in value.items()]
        return f'{{"dict": [{", ".join(pairs)}]}}'
    members = [(_order(v, text), text) for v in value for text in (_encode(v, depth, budget),)]
    return f'{{"{kind.__name__}": [{", ".join(text for _, text in sorted(members))}]}}'


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _order(value: Any, text: str) -> tuple[str, Any, str]:
    """Sorting key of a set member: by type, then natural order where there is a total one, then by text."""
    kind = type(value)
    natural = value if kind in (int, bool, str, bytes) or (kind is float and value == value) else 0
    return kind.__name__, natural, text


def decode(text: str) -> Any:
    """The value. ValueError says what is wrong with the text."""
    return _build(_tree(text), 0)


def equal(a: str, b: str) -> bool:
    """Whether two texts stand for the same value, type-exact. Both as `encode` writes them, but for the order of dicts and sets:
    files of problems are made so when they are read (shared.problems.importing). A text that cannot be read equals only
    itself."""
    if a == b:
        return True
    try:
        return _unordered(_tree(a), 0) == _unordered(_tree(b), 0)
    except ValueError:
        return False


def show(text: str) -> str:
    """The value as a Python expression, for prompts and people. ValueError as in `decode`."""
    return _show(_tree(text), 0)


def normalise(result: Any) -> Any:
    """What a function returned, as a plain value where a convention exists: at most MAX_ITEMS of an iterator, range or
    dict view as a list; deque as a list; subclasses of dict from `collections` as dict. Anything else unchanged."""
    kind = type(result)
    if kind in (OrderedDict, defaultdict, Counter):
        return dict(result)
    if kind is deque or kind in _DICT_VIEWS:
        return list(result)
    if kind is range or (isinstance(result, Iterator) and not isinstance(result, type)):
        return list(itertools.islice(result, MAX_ITEMS))
    return result


def outcome(result: Any, args: Sequence[Any], before: Callable[[], Sequence[Any]]) -> tuple[str, bool]:
    """Return the text that a call is judged by, and whether it is a changed argument. For a function that returns None and
    changed an argument in place, the text is the first changed list, dict or set, else `encode(normalise(result))`.
    `before` yields an untouched copy of the arguments."""
    if result is None:
        for now, original in zip(args, before(), strict=True):
            if isinstance(now, (list, dict, set)) and (text := encode(now)) != encode(original):
                return text, True
    return encode(normalise(result)), False


# The tree is what json.loads returns: dicts in it are tags, checked by `_tag`.


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f'found the bare constant {name}; write {{"float": "nan"}}')


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _tree(text: str) -> Any:
    if len(text) > MAX_TEXT:
        raise ValueError(f"text of {len(text)} characters; at most {MAX_TEXT}")
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None


_TAGS = ("int", "float", "str", "bytes", "tuple", "set", "frozenset", "dict")


def _tag(node: dict[str, Any], depth: int) -> tuple[str, Any]:
    """(tag, content), the content checked for its JSON type."""
    if len(node) != 1 or (tag := next(iter(node))) not in _TAGS:
        raise ValueError(f"object with keys {sorted(node)[:3]}; allowed: exactly one of {', '.join(_TAGS)}")
    content = node[tag]
    if not isinstance(content, str if tag in ("int", "float", "bytes") else list):
        raise ValueError(f"tag {tag!r} holds {type(content).__name__}")
    if tag == "str" and not all(type(c) is int and 0 <= c < 0x110000 for c in content):
        raise ValueError("tag 'str' holds something other than code points")
    if tag == "dict" and not all(type(pair) is list and len(pair) == 2 for pair in content):
        raise ValueError("tag 'dict' holds something other than [key, value] pairs")
    if depth >= MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    return tag, content


def _scalar(tag: str, content: Any) -> Any:
    if tag == "int":
        if not content.lower().startswith(("0x", "-0x")):
            raise ValueError(f'tag \'int\' holds {content[:40]!r}; allowed: hexadecimal as "0x1f" or "-0x1f"')
        return int(content, 16)
    if tag == "float":
        return float(content)
    if tag == "bytes":
        return bytes.fromhex(content)
    return "".join(map(chr, content))


def _build(node: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if type(node) is list:
        return [_build(v, depth + 1) for v in node]
    if type(node) is not dict:
        return node
    tag, content = _tag(node, depth)
    if tag in ("int", "float", "str", "bytes"):
        return _scalar(tag, content)
    if tag == "tuple":
        return tuple([_build(v, depth + 1) for v in content])
    try:
        if tag == "dict":
            value: Any = {_build(k, depth + 1): _build(v, depth + 1) for k, v in content}
        else:
            value = {"set": set, "frozenset": frozenset}[tag]([_build(v, depth + 1) for v in content])
    except TypeError as error:
        raise ValueError(f"tag {tag!r}: {error}") from None
    if len(value) != len(content):
        raise ValueError(f"tag {tag!r} repeats a key or member")
    return value


def _unordered(node: Any, depth: int) -> str:
    """A text equal for equal values: sets and dicts sorted by the text of their members."""
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if type(node) is list:
        return f"[{','.join([_unordered(v, depth + 1) for v in node])}]"
    if type(node) is not dict:
        return json.dumps(node)
    tag, content = _tag(node, depth)
    if tag in ("int", "float", "bytes", "str"):
        return json.dumps(node)
    if tag == "dict":
        members = [f"[{_unordered(k, depth + 1)},{_unordered(v, depth + 1)}]" for k, v in content]
    else:
        members = [_unordered(v, depth + 1) for v in content]
    if tag != "tuple":
        members.sort()
    return f'{{"{tag}":[{",".join(members)}]}}'


def _show(node: Any, depth: int) -> str:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if type(node) is list:
        return f"[{', '.join([_show(v, depth + 1) for v in node])}]"
    if type(node) is not dict:
        return repr(node)
    tag, content = _tag(node, depth)
    if tag == "float":
        return f"float({content!r})"
    if tag == "int":
        number = _scalar(tag, content)
        return repr(number) if number.bit_length() < 10_000 else hex(number)  # decimal text is quadratic in length
    if tag in ("str", "bytes"):
        return repr(_scalar(tag, content))
    if tag == "dict":
        return f"{{{', '.join([f'{_show(k, depth + 1)}: {_show(v, depth + 1)}' for k, v in content])}}}"
    members = ", ".join([_show(v, depth + 1) for v in content])
    if tag == "tuple":
        return f"({members},)" if len(content) == 1 else f"({members})"
    braced = f"{{{members}}}" if content else ""
    return (braced or "set()") if tag == "set" else f"frozenset({braced})"
