"""Which tests a draft names, besides those that fail."""

from __future__ import annotations

from services.curator.sources.python import kept_by_file


def test_tests_of_the_failing_tests_files_come_before_others_in_their_order() -> None:
    others = ["b.py::one", "a.py::two", "c.py::three", "a.py::K::four[b.py::x]"]
    assert kept_by_file(["a.py::zero"], others, 3) == ["a.py::two", "a.py::K::four[b.py::x]", "b.py::one"]
    assert kept_by_file(["a.py::zero"], others, 1) == ["a.py::two"]
    assert kept_by_file([], others, 9) == others
