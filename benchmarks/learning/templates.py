"""Templates of small Python functions and the words that fill them, for `benchmarks.learning.repositories`.

A template is a function with slots and some argument lists to call it with. Slots: `{f}` the function's name, `{x}` a thing,
`{xs}` several of it, `{a}`, `{b}` other words, `{n}` a whole number. Each split has templates and words of its own.

The words are invented, of two syllables. With a list of English nouns a small model learned the nouns by heart and never
learned to copy: it named training words where a held-out word stood before it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import xxhash

SPLITS = ("train", "dev", "held_out")


@dataclass(frozen=True, slots=True)
class Template:
    """`name`: for people. `cases`: argument lists as Python text, with slots."""

    name: str
    source: str
    cases: tuple[str, ...]


def _template(name: str, doc: str, signature: str, body: str, *cases: str) -> Template:
    lines = [f"    {line}" for line in body.strip("\n").split("\n")]
    source = "\n".join([f"def {{f}}({signature}):", f'    """{doc}"""', *lines])
    return Template(name, source, cases)


_LISTS = ("[4, 1, 7]", "[5]", "[2, 9, 3, 6]")

TEMPLATES: dict[str, tuple[Template, ...]] = {
    "train": (
        _template("total", "Return the sum of all {xs}.", "{xs}",
                  "total = 0\nfor {x} in {xs}:\n    total += {x}\nreturn total", *_LISTS, "[]"),
        _template("largest", "Return the largest of the {xs}.", "{xs}",
                  "best = {xs}[0]\nfor {x} in {xs}:\n    if {x} > best:\n        best = {x}\nreturn best", *_LISTS),
        _template("smallest", "Return the smallest of the {xs}.", "{xs}", "return min({xs})", *_LISTS),
        _template("above", "Return the {xs} greater than {a}.", "{xs}, {a}",
                  "return [{x} for {x} in {xs} if {x} > {a}]", "[4, 1, 7], 3", "[3, 5], 3", "[1, 2], 6"),
        _template("at_most", "Return the {xs} that are at most {a}.", "{xs}, {a}",
                  "return [{x} for {x} in {xs} if {x} <= {a}]", "[4, 1, 7], 4", "[3, 5], 2", "[1, 2], 2"),
        _template("count_even", "Count the even {xs}.", "{xs}",
                  "count = 0\nfor {x} in {xs}:\n    if {x} % 2 == 0:\n        count += 1\nreturn count", *_LISTS, "[2, 4]"),
        _template("double", "Return every {x} times 2.", "{xs}", "return [{x} * 2 for {x} in {xs}]", *_LISTS),
        _template("price", "Multiply {a} by {b}.", "{a}, {b}", "return {a} * {b}", "3, 4", "5, 6", "2, 2"),
        _template("remaining", "Subtract {b} from {a}.", "{a}, {b}", "return {a} - {b}", "9, 4", "5, 5", "3, 0"),
        _template("average", "Return the sum of the {xs} divided by their number.", "{xs}",
                  "if not {xs}:\n    return 0\nreturn sum({xs}) / len({xs})", "[4, 2]", "[5]", "[]", "[1, 2, 6]"),
        _template("label", "Write {a}, a colon and {b}.", "{a}, {b}", 'return f"{{{a}}}:{{{b}}}"',
                  "'red', 3", "'x', 'y'", "1, 2"),
        _template("clean", "Strip the {x} and make it lower case.", "{x}", "return {x}.strip().lower()",
                  "' Ab '", "'XYZ'", "'ok'"),
        _template("first", "Return the first {x}, or None if there is none.", "{xs}",
                  "if not {xs}:\n    return None\nreturn {xs}[0]", "[4, 1]", "[]", "['a', 'b']"),
        _template("limit", "Return {a}, but at most {n}.", "{a}",
                  "if {a} > {n}:\n    return {n}\nreturn {a}", "{n} + 5", "{n} - 1", "0", "{n}"),
        _template("within", "Tell whether {x} lies between {a} and {b}, both included.", "{x}, {a}, {b}",
                  "return {a} <= {x} and {x} <= {b}", "3, 1, 5", "1, 1, 5", "5, 1, 5", "6, 1, 5", "0, 1, 5"),
        _template("count", "Count how often each {x} occurs.", "{xs}",
                  "counts = {{}}\nfor {x} in {xs}:\n    counts[{x}] = counts.get({x}, 0) + 1\nreturn counts",
                  "['a', 'b', 'a']", "[]", "['c']"),
        _template("join", "Join the {xs} with a comma.", "{xs}", 'return ",".join({xs})', "['a', 'b']", "['c']", "[]"),
        _template("find", "Return the {a} of the {x}, or {n} if it is unknown.", "{a}, {x}",
                  "return {a}.get({x}, {n})", "{{'a': 1}}, 'a'", "{{'a': 1}}, 'b'", "{{}}, 'c'"),
        _template("add", "Add {b} to {a}. {b} is {n} by default.", "{a}, {b}={n}", "return {a} + {b}", "4", "1, 2", "0, 3"),
        _template("to_minutes", "Convert {a} hours and {b} minutes to minutes.", "{a}, {b}",
                  "return {a} * 60 + {b}", "1, 5", "2, 0", "0, 7"),
        _template("sorted", "Return the {xs}, largest first.", "{xs}", "return sorted({xs}, reverse=True)", *_LISTS),
        _template("is_empty", "Tell whether there are no {xs}.", "{xs}", "return len({xs}) == 0", "[]", "[1]", "[1, 2]"),
        _template("positive", "Tell whether all {xs} are above 0.", "{xs}",
                  "for {x} in {xs}:\n    if {x} <= 0:\n        return False\nreturn True", "[1, 2]", "[0, 1]", "[-1]", "[]"),
        _template("set", "Store {b} under {x} and return the {a}.", "{a}, {x}, {b}",
                  "{a}[{x}] = {b}\nreturn {a}", "{{}}, 'k', 2", "{{'k': 1}}, 'k', 3", "{{'z': 0}}, 'q', 1"),
        _template("collect", "Return all {xs} of every group.", "groups",
                  "{xs} = []\nfor group in groups:\n    for {x} in group:\n        {xs}.append({x})\nreturn {xs}",
                  "[[1], [2, 3]]", "[]", "[[4, 5]]"),
        _template("skip", "Return the {xs} without the first {n}.", "{xs}", "return {xs}[{n}:]",
                  "list(range(12))", "[1]", "list(range(15))"),
        _template("gap", "Return how far {a} and {b} are apart.", "{a}, {b}",
                  "if {a} > {b}:\n    return {a} - {b}\nreturn {b} - {a}", "5, 2", "2, 5", "3, 3"),
        _template("discount", "Return {a} less {n} percent.", "{a}", "return {a} - {a} * {n} / 100", "200", "50", "0"),
        _template("either", "Tell whether {a} or {b} is set.", "{a}, {b}", "return bool({a} or {b})", "1, 0", "0, 0", "1, 1"),
        _template("square", "Return {a} times {a}, plus {b}.", "{a}, {b}", "return {a} * {a} + {b}", "3, 1", "2, 5", "0, 4"),
    ),
    "dev": (
        _template("product", "Return all {xs} multiplied.", "{xs}",
                  "result = 1\nfor {x} in {xs}:\n    result *= {x}\nreturn result", *_LISTS, "[]"),
        _template("below", "Return the {xs} less than {a}.", "{xs}, {a}",
                  "return [{x} for {x} in {xs} if {x} < {a}]", "[4, 1, 7], 5", "[3, 5], 3", "[1, 2], 6"),
        _template("last", "Return the last {x}, or None if there is none.", "{xs}",
                  "if not {xs}:\n    return None\nreturn {xs}[-1]", "[4, 1]", "[]", "['a', 'b', 'c']"),
        _template("shout", "Strip the {x} and make it upper case.", "{x}", "return {x}.strip().upper()",
                  "' Ab '", "'xyz'", "'ok'"),
        _template("share", "Return {a} as a percentage of {b}.", "{a}, {b}",
                  "if {b} == 0:\n    return 0\nreturn {a} * 100 / {b}", "1, 2", "3, 0", "5, 5"),
        _template("both", "Tell whether {a} and {b} are set.", "{a}, {b}", "return bool({a} and {b})", "1, 0", "1, 1", "0, 0"),
    ),
    "held_out": (
        _template("sum_even", "Return the sum of the even {xs}.", "{xs}",
                  "total = 0\nfor {x} in {xs}:\n    if {x} % 2 == 0:\n        total += {x}\nreturn total", *_LISTS, "[]"),
        _template("longest", "Return the largest length of the {xs}.", "{xs}",
                  "best = 0\nfor {x} in {xs}:\n    if len({x}) > best:\n        best = len({x})\nreturn best",
                  "['a', 'bbb']", "[]", "['cc']"),
        _template("exclude", "Return the {xs} other than {a}.", "{xs}, {a}",
                  "return [{x} for {x} in {xs} if {x} != {a}]", "[4, 1, 4], 4", "[3, 5], 2", "[2], 2"),
        _template("raise_to", "Return {a}, but at least {n}.", "{a}",
                  "if {a} < {n}:\n    return {n}\nreturn {a}", "{n} + 5", "{n} - 1", "0", "{n}"),
        _template("triple", "Return every {x} times 3.", "{xs}", "return [{x} * 3 for {x} in {xs}]", *_LISTS),
        _template("path", "Write {a}, a slash and {b}.", "{a}, {b}", 'return f"{{{a}}}/{{{b}}}"', "'red', 3", "'x', 'y'", "1, 2"),
        _template("to_seconds", "Convert {a} hours and {b} minutes to seconds.", "{a}, {b}",
                  "return {a} * 3600 + {b} * 60", "1, 5", "2, 0", "0, 7"),
        _template("outside", "Tell whether {x} is less than {a} or greater than {b}.", "{x}, {a}, {b}",
                  "return {x} < {a} or {x} > {b}", "3, 1, 5", "1, 1, 5", "5, 1, 5", "6, 1, 5", "0, 1, 5"),
        _template("take", "Return the first {n} {xs}.", "{xs}", "return {xs}[:{n}]", "list(range(12))", "[1]", "list(range(15))"),
        _template("subtract", "Subtract {b} from {a}. {b} is {n} by default.", "{a}, {b}={n}",
                  "return {a} - {b}", "40", "9, 2", "5, 3"),
        _template("negative", "Count the {xs} below 0.", "{xs}",
                  "count = 0\nfor {x} in {xs}:\n    if {x} < 0:\n        count += 1\nreturn count",
                  "[1, -2]", "[0, 1]", "[-1, -3]", "[]"),
        _template("spread", "Return the largest less the smallest of the {xs}.", "{xs}",
                  "return max({xs}) - min({xs})", *_LISTS),
    ),
}  # fmt: skip

_CONSONANTS, _VOWELS, _ENDS = "bdfgklmnprstvz", "aeiou", ("", "", "n", "r", "l", "k")
_TAKEN = frozenset({"total", "result"})  # local names in templates


def word(rng: random.Random, split: str) -> str:
    """Return an invented word of the split: `kelo`, `bimar`. Each word belongs to one split; there are about 24,000."""
    while True:
        letters = [rng.choice(group) for group in (_CONSONANTS, _VOWELS, _CONSONANTS, _VOWELS, _ENDS)]
        made = "".join(letters)
        if made not in _TAKEN and split_of(made) == split:
            return made


def split_of(made: str) -> str:
    """Return the split that a word belongs to: eight tenths are for training."""
    return ("dev", "held_out")[lot] if (lot := xxhash.xxh32_intdigest(made.encode()) % 10) < 2 else "train"
