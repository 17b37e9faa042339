"""Files for people: refused before the work where they cannot be, and never half there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.output import NotWritable, require_writable, write_whole


def test_a_place_that_cannot_be_written_is_refused_with_its_option_and_left_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(NotWritable, match=r"--json .*: is a folder; give a file"):
        require_writable(tmp_path, "--json")
    with pytest.raises(NotWritable, match=rf"there is no folder {tmp_path / 'gone'}; make it"):
        require_writable(tmp_path / "gone" / "a.json", "--json")
    (tmp_path / "file").touch()
    with pytest.raises(NotWritable, match="there is no folder"):
        require_writable(tmp_path / "file" / "a.json", "--json")
    with pytest.raises(NotWritable, match="cannot be written"):
        require_writable(Path("/proc/a.json"), "--json")
    require_writable(tmp_path / "a.json", "--json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_was_there_stays_where_the_new_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_text() == "old"
    write_whole(path, "new")
    assert path.read_text() == "new"
    assert [found.name for found in tmp_path.iterdir()] == ["a.json"]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "real")
    write_whole(link, "text")
    assert link.is_symlink()
    assert (tmp_path / "real").read_text() == "text"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        require_writable(pipe, "--json")
        write_whole(pipe, "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
