"""Where a replica writes its versions for SGLang."""

from __future__ import annotations

from services.inference.sglang.place import Place


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    for name in ("", "named"):
        killed = Place(tmp_path, name)
        (killed.folder / "1" / "0").mkdir(parents=True)
        if killed._lock is not None:
            killed._lock.close()  # what the kernel does
        after = Place(tmp_path, name)
        assert after.folder == killed.folder
        assert not after.folder.exists()


def test_processes_without_a_name_share_no_folder(tmp_path):
    first, second = Place(tmp_path, ""), Place(tmp_path, "")
    (first.folder / "1").mkdir(parents=True)
    assert first.folder != second.folder
    again = Place(tmp_path, "")
    assert (first.folder / "1").exists()
    assert again.folder not in (first.folder, second.folder)
    first.leave()
    assert Place(tmp_path, "").folder == first.folder
