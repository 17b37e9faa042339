"""Rules of a configuration's fields: each is looked up once, and every type has a name for the reader."""

from __future__ import annotations

from typing import Any

import pytest

from shared.contracts.allowed import Names, kind


def test_the_names_that_are_installed_are_looked_up_once_for_a_whole_field() -> None:
    looked: list[int] = []

    def installed() -> tuple[str, ...]:
        looked.append(1)
        return ("a", "b")

    assert list(Names(installed).objections("terms", ["a", "c", "b", "d"])) == [
        "terms: found 'c'; allowed: a, b",
        "terms: found 'd'; allowed: a, b",
    ]
    assert len(looked) == 1


@pytest.mark.parametrize(
    ("hint", "said"),
    [
        (bytes, "a value of type bytes"),
        (frozenset[str], "a value of type frozenset"),
        (bytes | None, "a value of type bytes or null"),
        (Any, "a value of type Any"),
        (int | None, "a whole number or null"),
    ],
)
def test_a_type_that_no_field_has_yet_is_named_as_it_is(hint: Any, said: str) -> None:
    assert kind(hint) == said
