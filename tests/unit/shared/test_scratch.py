"""Room for large files on their way, in a place where processes are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shared.scratch import scratch

HOLDS = """
import sys, time
from pathlib import Path
from shared.scratch import scratch
with scratch(Path(sys.argv[1]), "part-") as folder:
    (folder / "many-bytes").write_bytes(bytes(1000))
    print(folder.name, flush=True)
    time.sleep(60)
"""


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def test_what_a_killed_process_left_goes_with_the_next_and_what_a_living_one_holds_stays(tmp_path: Path) -> None:
    others = [
        subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path], stdout=subprocess.PIPE, text=True) for _ in "12"
    ]
    try:
        dead, alive = (process.stdout.readline().strip() for process in others if process.stdout)
        (tmp_path / "of-somebody-else").mkdir()
        others[0].kill()
        others[0].wait()
        assert names(tmp_path) == {dead, alive, "of-somebody-else"}
        with scratch(tmp_path, "part-") as mine:
            assert names(tmp_path) == {mine.name, alive, "of-somebody-else"}
        assert names(tmp_path) == {alive, "of-somebody-else"}
        assert (tmp_path / alive / "many-bytes").exists()
    finally:
        for process in others:
            process.kill()
            process.wait()


def test_what_was_renamed_stays(tmp_path: Path) -> None:
    with scratch(tmp_path / "new", "part-") as folder:
        (folder / "file").write_text("whole")
        folder.rename(tmp_path / "new" / "done")
    with scratch(tmp_path / "new", "part-"):
        assert (tmp_path / "new" / "done" / "file").read_text() == "whole"
