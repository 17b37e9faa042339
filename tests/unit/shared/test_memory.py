"""Free memory: the machine's, or what a container's limit leaves where that is less."""

from __future__ import annotations

from pathlib import Path

from shared.memory import free_bytes

GIB = 2**30


def machine(folder: Path, free_gib: int) -> Path:
    path = folder / "meminfo"
    path.write_text(f"MemTotal: {64 << 20} kB\nMemFree: 100 kB\nMemAvailable: {free_gib << 20} kB\n")
    return path


def test_a_containers_limit_counts_where_it_leaves_less_than_the_machine_and_cached_files_give_way(
    tmp_path: Path,
) -> None:
    meminfo = machine(tmp_path, 10)
    assert free_bytes(meminfo, tmp_path / "none") == 10 * GIB
    two, one = tmp_path / "two", tmp_path / "one" / "memory"
    two.mkdir()
    one.mkdir(parents=True)
    (two / "memory.max").write_text("max\n")
    (two / "memory.current").write_text(f"{2 * GIB}\n")
    assert free_bytes(meminfo, two) == 10 * GIB
    (two / "memory.max").write_text(f"{4 * GIB}\n")
    assert free_bytes(meminfo, two) == 2 * GIB
    (two / "memory.stat").write_text(f"anon 5\ninactive_file {GIB}\nactive_file {GIB // 2}\n")
    assert free_bytes(meminfo, two) == 3.5 * GIB
    (one / "memory.limit_in_bytes").write_text(f"{2 * GIB}\n")
    (one / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    assert free_bytes(meminfo, tmp_path / "one") == 0
    (one / "memory.stat").write_text(f"total_inactive_file {GIB}\ntotal_active_file {GIB}\n")
    assert free_bytes(meminfo, tmp_path / "one") == GIB
    (one / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # version 1 says so where there is none
    assert free_bytes(meminfo, tmp_path / "one") == 10 * GIB


def test_where_nobody_says_there_is_no_figure(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "none", tmp_path / "none") is None


def test_of_this_machine_there_is_one() -> None:
    assert free_bytes()
