"""What bubblewrap's own words mean on a machine that forbids a sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared import namespaces

DENIED = "bwrap: No permissions to create new namespace"


@pytest.mark.parametrize(
    ("said", "files", "text"),
    [
        ("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", {}, "systempaths=unconfined"),
        ("Unconfinable: mount /proc: Operation not permitted (errno 1)", {}, "procMount: Unmasked"),
        ("/bin/cp: error writing 'x': No space left on device", {}, "free some"),
        (DENIED, {"sys/user/max_user_namespaces": "0"}, "user.max_user_namespaces=10000"),
        (DENIED, {"sys/kernel/unprivileged_userns_clone": "0"}, "unprivileged_userns_clone=1"),
        (
            "bwrap: setting up uid map: Permission denied",
            {"sys/kernel/apparmor_restrict_unprivileged_userns": "1"},
            "AppArmor",
        ),
        (DENIED, {"self/status": "Name:\tx\nSeccomp:\t2\n"}, "seccomp-worker.json"),
        (
            "clone with new namespaces: No space left on device (errno 28)",
            {"sys/user/max_user_namespaces": "0"},
            "max_user_na",
        ),
    ],
)
def test_the_way_out_is_that_of_what_is_missing(said: str, files: dict[str, str], text: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content + "\n")
    assert text in namespaces.hint(said, tmp_path)


def test_what_nobody_knows_has_no_hint(tmp_path: Path) -> None:
    assert namespaces.hint("bwrap: Unknown option --x", tmp_path) == ""
    (tmp_path / "sys/user").mkdir(parents=True)
    (tmp_path / "sys/user/max_user_namespaces").write_text("96365\n")
    assert namespaces.hint(DENIED, tmp_path) == ""
