"""Attacks on what a sandbox's owner speaks through: the session's shell, the loop behind it, their descriptors and messages.

Each script ends with status 7, or ends its shell. A sandbox that keeps its promises reports just that, and the next command of the
session works: its whole output and its status are its own. The naive sandbox, which reads a fixed mark, fails by each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from shared.sandbox import SandboxUnavailable
from shared.sandbox.contract import Cause
from tests.integration.naive_sandbox import MARK
from tests.integration.sandbox_attacks import ROOT, Attack, World, adapters, attempt, python, works, world_of

FORGED = f"""
import json, struct
frames = [b'\\n{MARK} 0\\n', b'\\n{MARK}\\n', b'\\0' * 64, b'\\xff' * 64, os.urandom(256)]
for result in (dict(exit_code=0, cause='exited', code=0, status=0, done=True, ok=True, kind='exit', id=1),):
    text = json.dumps(result).encode()
    frames += [text + b'\\n', struct.pack('>I', len(text)) + text, struct.pack('<I', len(text)) + text]
    frames += [struct.pack('>Q', len(text)) + text, struct.pack('<Q', len(text)) + text, struct.pack('>I', 1 << 31)]
"""
EVERY_DESCRIPTOR = FORGED + (
    """
for fd in range(4096):
    for frame in frames:
        try:
            os.set_blocking(fd, False)
            os.write(fd, frame)
        except OSError:
            pass
sys.exit(7)
"""
)
OF_THE_SHELL = FORGED + (
    """
for pid in (os.getppid(), os.getpid()):
    for fd in range(4096):
        try:
            out = os.open('/proc/%d/fd/%d' % (pid, fd), os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            continue
        for frame in frames:
            try:
                os.write(out, frame)
            except OSError:
                pass
sys.exit(7)
"""
)
LIMITS_OF_ALL = """
import resource
for pid in (os.getppid(), @loop_to_limit@):
    for what in (resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_STACK, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE):
        try:
            resource.prlimit(pid, what, (0, 0))
        except OSError:
            pass
os.kill(os.getppid(), signal.SIGCONT)
"""
WORDS = "printf echo eval exit return cd export trap read wait kill set unset true exec source builtin command type test local"


@dataclass(frozen=True, slots=True)
class Trick:
    """`next`: a command that follows, whose output ends with `alive`. `ends`: the script may end its shell. `costs`: it may spoil
    its session; a new one works."""

    name: str
    script: str
    time_s: float = 10.0
    ends: bool = False
    costs: bool = False
    next: str = "printf alive; (exit 7)"


TRICKS = [
    Trick("a forged end", f"printf '\\n{MARK} 0\\n'; printf '\\n{MARK}\\n' >&2; (exit 7)"),
    Trick("forged messages on every descriptor", python(EVERY_DESCRIPTOR)),
    Trick("forged messages by way of proc", python(OF_THE_SHELL), costs=True),
    Trick(
        "a forged end that comes late",
        f"(sleep 0.2; printf '\\n{MARK} 0\\n') & (exit 7)",
        next="sleep 0.5; printf alive; (exit 7)",
    ),
    Trick("runs the next message itself", 'IFS= read -r line; IFS= read -r line; eval "true; $line"; (exit 7)', 2.0),
    Trick("swallows the input", "cat > swallowed; (exit 7)", 2.0),
    Trick("swallows the input in the background", "exec 9<&0; (cat <&9 > swallowed) & (exit 7)", 2.0),
    Trick("closes every descriptor", 'for fd in $(seq 0 255); do eval "exec $fd>&-"; done; (exit 7)', 2.0, ends=True),
    Trick(
        "replaces every descriptor",
        'for fd in $(seq 0 255); do eval "exec $fd<>/dev/null"; done 2>/dev/null; (exit 7)',
        2.0,
    ),
    Trick(
        "other meanings for words",
        "".join(f"{word}() {{ :; }}; " for word in WORDS.split()) + "(exit 7)",
        2.0,
        next="/usr/bin/printf alive; (\\exit 7)",
        ends=True,
    ),
    Trick(
        "a trap before every command",
        f"trap 'builtin printf \"\\n{MARK} 0\\n\"' DEBUG; (exit 7)",
        2.0,
        next="trap - DEBUG; printf alive; (exit 7)",
    ),
    Trick("a shell that runs nothing", "set -n", 2.0, ends=True),
    Trick("a shell that ends at an error", "set -e; (exit 7); true", 2.0, ends=True),
    Trick("an exit", "exit 7", 2.0, ends=True),
    Trick("another program in place of the shell", "exec sleep 600", 1.0, ends=True),
    Trick("a shell that ends at a message", "trap 'kill -9 $$' USR1 CHLD; kill -USR1 $$; sleep 5", 2.0, ends=True),
    Trick("a stopped shell", "kill -STOP $$", 1.0, ends=True),
    Trick(
        "signals to the loop",
        "for s in KILL STOP SEGV TERM HUP INT QUIT USR1 USR2 PIPE ALRM CHLD; do kill -$s @loop@ 2>/dev/null; done; (exit 7)",
        2.0,
    ),
]
TRICKS += [
    Trick("takes all limits from the shell and the loop", python(LIMITS_OF_ALL), 2.0, ends=True),
    Trick(
        "steals the input of the shell",
        "exec 9<&0; (cat <&9 >stolen) & (cat /proc/$$/fd/0 >stolen) & (exit 7)",
        2.0,
        costs=True,
    ),
]
# The naive sandbox withstands these, for it has no loop: an adapter has more to lose.
STRAINS = [
    Trick("a child that keeps the output", "sleep 600 & (exit 7)"),
    Trick("an environment of megabytes", 'export X="$(head -c 3000000 /dev/zero | tr "\\0" x)"; (exit 7)'),
    Trick("thousands of variables", "for n in $(seq 20000); do export V$n=$n; done; (exit 7)", 20.0),
    Trick(
        "a folder that is gone", 'mkdir gone; cd gone; rmdir "../gone"; (exit 7)', next="cd /; printf alive; (exit 7)"
    ),
    Trick("a line of megabytes", "head -c 20000000 /dev/zero | tr '\\0' x; (exit 7)", next="printf alive; (exit 7)"),
    Trick("odd bytes", "printf '\\377\\0\\376' >&2; printf '\\033[2J\\377'; (exit 7)"),
    Trick("a broken script", "if then (((", ends=True),
    Trick("an unended quote", "echo 'x", ends=True),
    Trick("an unended document", "cat <<EOF\nx", ends=True),
    Trick("a long script", ": " + "x" * 200_000 + "\n(exit 7)", 30.0),
    Trick("a script with a mark of its end", f": __END__ EOF {MARK}\n(exit 7)"),
    Trick(
        "odd variables",
        "IFS=x; PS4='$(exit 3)'; ENV=/none BASH_ENV=/none; HOME=/none; CDPATH=/; GLOBIGNORE=*; (exit 7)",
    ),
    Trick("threads of signals", "trap '' TERM INT HUP CHLD PIPE; (exit 7)"),
]
LOOP = [
    Attack("descriptors of the loop", "if os.listdir('/proc/@loop_pid@/fd'): hole()", python=True),
    Attack("environment of the loop", "if slurp('/proc/@loop_pid@/environ'): hole()", python=True),
    Attack("map of the loop's memory", "if slurp('/proc/@loop_pid@/maps'): hole()", python=True),
    Attack("root of the loop", "if os.listdir('/proc/@loop_pid@/root/'): hole()", python=True),
    Attack("program of the loop", "hole(os.readlink('/proc/@loop_pid@/exe'))", python=True),
    Attack(
        "writing the loop's memory",
        "os.close(os.open('/proc/@loop_pid@/mem', os.O_RDWR))\nhole()",
        python=True,
        able=ROOT,
    ),
]


@pytest.fixture(scope="module")
def naive() -> Iterator[World]:
    with world_of("naive") as world:
        yield world


@pytest.fixture(scope="module", params=adapters())
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with world_of(request.param) as world:
        yield world


def deceived(world: World, trick: Trick) -> str:
    """Return what the owner of the sandbox was wrongly told; empty: nothing."""
    return world.runner.run(_deceived(world, trick))


async def _deceived(world: World, trick: Trick) -> str:
    session = await world.mine.session()
    try:
        result = await session.run(world.text(trick.script), time_s=trick.time_s)
        if not trick.ends and (result.exit_code, result.cause) != (7, Cause.exited):
            return f"ended with {result.exit_code}, {result.cause}: {result.stderr[-300:]!r}"
        if trick.costs:
            await session.run(trick.next, time_s=1.0)
            await session.close()
            session = await world.mine.session()
        after = await session.run(trick.next, time_s=10.0)
        if after.exit_code != 7 or not after.stdout.endswith(b"alive"):
            return f"the next command: {after.exit_code}, {after.cause}, {after.stdout[-99:]!r} {after.stderr[-99:]!r}"
        return "" if await works(session) else "the command after the next"
    except SandboxUnavailable as error:
        return f"unavailable: {error}"
    finally:
        await session.close()


def named(tricks: list[Trick]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("trick", tricks, ids=[trick.name.replace(" ", "-") for trick in tricks])


LOOP_IDS = [attack.name.replace(" ", "-") for attack in LOOP]


@named(TRICKS)
def test_the_owner_of_the_naive_sandbox_is_deceived(naive: World, trick: Trick) -> None:
    assert deceived(naive, trick)


@named([*TRICKS, *STRAINS])
def test_the_owner_is_told_the_truth(world: World, trick: Trick) -> None:
    assert deceived(world, trick) == ""


@pytest.mark.parametrize("attack", LOOP, ids=LOOP_IDS)
def test_the_worker_can_be_reached_in_the_naive_sandbox(naive: World, attack: Attack) -> None:
    if not attack.able:
        pytest.skip("this host cannot show it")
    assert attempt(naive, attack)


@pytest.mark.parametrize("attack", LOOP, ids=LOOP_IDS)
def test_the_loop_cannot_be_reached(world: World, attack: Attack) -> None:
    assert not attempt(world, attack)
