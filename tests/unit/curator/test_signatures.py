"""Signatures find the same function under other names, and nearly the same one; their file is the same everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from services.curator import cli, mutate
from shared.problems.signatures import BYTES, Signatures, fingerprint, read_signatures, write_signatures

ONE = """def total(prices, tax):
    result = 0
    for price in prices:
        if price > 0:
            result += price * (1 + tax)
    return round(result, 2)"""
RENAMED = ONE.replace("prices", "xs").replace("price", "x").replace("tax", "t").replace("total", "g")
EDITED = ONE.replace("price > 0", "price >= 0")
OTHER = """def words(text):
    return sorted({word.lower() for word in text.split() if word.isalpha()})"""


def test_other_names_have_the_same_key_and_signature():
    assert fingerprint(ONE) == fingerprint(RENAMED)


def test_a_slightly_edited_copy_is_near_and_another_function_is_not():
    signatures = Signatures()
    signatures.add(*fingerprint(ONE))
    assert signatures.has_near(*fingerprint(RENAMED))
    assert signatures.has_near(*fingerprint(EDITED))
    assert not signatures.has_near(*fingerprint(OTHER))


def test_the_numbers_are_those_that_shipped_files_hold():
    """If this fails, every shipped signature file is void."""
    key, minima = fingerprint(ONE)
    assert (key, minima[:8].hex(), len(minima)) == GOLDEN


GOLDEN = ("e658d913f50a6dc4", "a2ac2b23c182f52f", BYTES)


@settings(deadline=None)
@given(st.permutations([ONE, EDITED, OTHER]))
def test_the_file_holds_what_was_written_in_any_order(order: list[str]):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path, again = Path(folder) / "a.npz", Path(folder) / "b.npz"
        assert write_signatures(order, path) == 3
        write_signatures([fingerprint(source) for source in (ONE, EDITED, OTHER, RENAMED)], again)
        assert path.read_bytes() == again.read_bytes()
        signatures = read_signatures(path)
    assert len(signatures) == 3
    assert signatures.has_near(*fingerprint(OTHER))


@settings(deadline=None)
@given(st.data())
def test_the_set_that_is_read_answers_as_the_one_that_grows(data: st.DataObject):
    import tempfile

    minima = st.lists(st.integers(0, 3), min_size=BYTES // 2, max_size=BYTES // 2).map(
        lambda values: b"".join(value.to_bytes(2, "little") for value in values)
    )
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 2**64 - 1).map("{:016x}".format), minima), max_size=6))
    base = data.draw(minima)
    asked = [*pairs, *(("00", base[:cut] + p[cut:]) for _, p in pairs for cut in (0, 24, 40, 60))]
    growing = Signatures()
    for pair in pairs:
        growing.add(*pair)
    with tempfile.TemporaryDirectory() as folder:
        write_signatures(pairs, Path(folder) / "a.npz")
        known = read_signatures(Path(folder) / "a.npz")
    assert [known.has_near(*pair) for pair in asked] == [growing.has_near(*pair) for pair in asked]


def test_another_file_is_refused_by_name(tmp_path: Path):
    path = tmp_path / "x.npz"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"x\.npz: no file of signatures"):
        read_signatures(path)


def test_a_package_that_goes_without_the_signatures_makes_no_pack_unfiltered(tmp_path: Path, monkeypatch):
    """The image `light` leaves them out. Where no base policy is part of the package there is nothing to know."""
    monkeypatch.setattr(mutate, "shipped", lambda: tmp_path)
    assert mutate._shipped_signatures() is None
    (tmp_path / "config.json").write_text("{}")
    result = CliRunner().invoke(cli.app, ["mutate", "--out", str(tmp_path / "pack")], env={"COLUMNS": "400"})
    assert result.exit_code == 2
    assert "signatures.npz: missing" in result.output
    assert not (tmp_path / "pack").exists()
    (tmp_path / "signatures.npz").touch()
    assert mutate._shipped_signatures() == tmp_path / "signatures.npz"
