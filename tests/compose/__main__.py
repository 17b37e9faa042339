"""`python -m tests.compose [--minutes 15] [--kill all] [--roll all] [--scale rollout=2] [--problems 100] [--down]`

A run in docker compose on this machine: everything is started and must become healthy, `demo` starts a run, its policy is
measured, replicas are added, every container that is named is killed (kill -9 of its first process: the engine must start it
again), each service is restarted container by container (it must drain: end by itself with exit code 0), the whole platform
goes down and comes up again, the run must go on and end, its ledger is audited, its last version is measured, and Prometheus is
asked every expression of the dashboards. One line per event with its time; exit code 0 only if all of that held. (Whether the
policy got better is told, not judged: strikes and few steps are no practice.) Needs the images (`docker compose build` or
`make images`) and `.env`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from infra.grafana import check

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = "http://localhost:9090"
OURS = ("scheduler", "curator", "trainer", "inference", "reward", "grader", "rollout", "evaluator", "console")
SERVERS = ("kafka", "postgres", "minio", "redis")
BACK_WITHIN_S = 180.0
UP_WITHIN_S = 600
SETTLE_S = 10.0  # between two strikes: the next one must hit a platform that works again


class Failed(AssertionError):
    """What should have happened and did not."""


def docker(*arguments: str, quiet: bool = True) -> str:
    """Standard output of `docker …`. Raises Failed with what it said."""
    done = subprocess.run(["docker", *arguments], cwd=ROOT, capture_output=quiet, text=True)
    if done.returncode:
        raise Failed(f"docker {' '.join(arguments)}: {(done.stderr or done.stdout or '').strip()[-2000:]}")
    return done.stdout or ""


def containers(service: str) -> list[str]:
    return docker("compose", "ps", "-q", service).split()


def state(container: str) -> dict[str, Any]:
    return json.loads(docker("inspect", "-f", "{{json .}}", container))


def audit(run: str) -> dict[str, Any]:
    """The ledger's audit as JSON: exit code 1 (violations) is an answer, too."""
    command = ["docker", "compose", "exec", "-T", "scheduler", "etude", "ledger", "audit", "--json", run]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 2 or not done.stdout:
        raise Failed(f"etude ledger audit {run}: {done.stderr.strip()[-600:]}")
    return json.loads(done.stdout)


def over(run: str) -> bool:
    return bool(audit(run)["state"] == "finished")


def require_practice(run: str) -> None:
    """A strike after the run's end would prove nothing. Raises Failed."""
    if over(run):
        raise Failed(f"{run} ended before all strikes: give it more --minutes or --steps")


def measure(run: str, options: argparse.Namespace) -> str:
    """The newest version on the held-out problems: the last row of the table."""
    command = f"etude measure {run} --problems {options.problems} --samples 4"
    shown = docker("compose", "run", "--rm", "-T", "cli", *command.split())
    return " ".join(shown.strip().splitlines()[-1].split())


def steps(run: str) -> float:
    """Steps that Prometheus has seen of this run; over restarts of the trainer."""
    found = check.call(PROMETHEUS, "query", query=f'max(max_over_time(etude_trainer_serial{{run="{run}"}}[1h]))')
    return max((float(one["value"][1]) for one in found["result"]), default=0.0)


def until(there: Callable[[], bool], what: str, within_s: float) -> float:
    """Seconds that it took. Raises Failed."""
    began = time.monotonic()
    while time.monotonic() - began < within_s:
        try:
            if there():
                return time.monotonic() - began
        except (Failed, OSError, ValueError):
            pass  # asked while it was away: that is what is waited for
        time.sleep(1.0)
    raise Failed(f"{what}: not within {within_s:.0f} s")


def healthy(container: str, since: int = -1) -> bool:
    """`since`: restarts by the engine that do not count."""
    found = state(container)
    return found["State"].get("Health", {}).get("Status") == "healthy" and found["RestartCount"] > since


def kill(service: str) -> float:
    """Seconds from the kill until the same container is healthy again.

    `docker kill` would count as stopped by a person, and nothing would start it again.
    """
    container = containers(service)[0]
    before = state(container)
    os.kill(before["State"]["Pid"], signal.SIGKILL)
    return until(lambda: healthy(container, before["RestartCount"]), f"{service} back and healthy", BACK_WITHIN_S)


def roll(service: str) -> float:
    """Stops and starts its containers, one after the other. Seconds until the last is healthy again. Raises Failed, also where
    one had to be killed."""
    began = time.monotonic()
    for container in containers(service):
        docker("stop", container)  # SIGTERM, and after its stop_grace_period SIGKILL
        if code := state(container)["State"]["ExitCode"]:
            raise Failed(f"{service} did not drain: exit code {code}\n{docker('logs', '--tail', '20', container)}")
        docker("start", container)
        until(partial(healthy, container), f"{service} back and healthy", BACK_WITHIN_S)
    return time.monotonic() - began


def again(scale: str) -> float:
    """`docker compose down && docker compose up`: seconds until all are healthy again."""
    began = time.monotonic()
    docker("compose", "down")
    replicas = [word for pair in scale.split(",") if pair for word in ("--scale", pair)]
    docker("compose", "up", "-d", "--wait", "--wait-timeout", str(UP_WITHIN_S), *replicas)
    return time.monotonic() - began


def named(option: str, given: str, known: tuple[str, ...], parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """What `all`, `none` or names with commas between them stand for."""
    chosen = {"all": known, "none": ()}.get(given, tuple(given.split(",")))
    if unknown := set(chosen) - set(known):
        parser.error(f"{option}: found {sorted(unknown)[0]!r}; allowed: {', '.join(known)}, all, none")
    return chosen


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description="A run in docker compose, rehearsed.")
    parser.add_argument("--steps", type=int, default=0, help="the run's own end; 0: by time alone")
    parser.add_argument("--minutes", type=float, default=15.0, help="the run's own end by time")
    parser.add_argument("--kill", default="all", help=f"by commas, of {', '.join((*OURS, *SERVERS))}; all; none")
    parser.add_argument("--roll", default="all", help=f"to restart, by commas, of {', '.join(OURS)}; all; none")
    parser.add_argument("--stay", action="store_true", help="no `docker compose down && up` in between")
    parser.add_argument("--scale", default="rollout=2,grader=2", help="by commas; empty: none")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds to the first step, and to the run's end")
    parser.add_argument("--problems", type=int, default=100, help="held-out problems, before and after")
    parser.add_argument("--down", action="store_true", help="`docker compose down` at the end; volumes are kept")
    options = parser.parse_args()
    options.kill = named("--kill", options.kill, (*OURS, *SERVERS), parser)
    options.roll = named("--roll", options.roll, OURS, parser)
    return options


def rehearse(options: argparse.Namespace, say: Callable[[str], None]) -> bool:
    """Whether everything held. Raises Failed where it cannot go on."""
    began = time.monotonic()
    docker("compose", "up", "-d", "--wait", "--wait-timeout", str(UP_WITHIN_S), quiet=False)
    say(f"up and healthy after {time.monotonic() - began:.0f} s")
    began, wall = time.monotonic(), time.time()
    limits = f"--paused --minutes {options.minutes} --steps {options.steps}"
    told = docker("compose", "run", "--rm", "-T", "demo", *limits.split())
    (run,) = re.findall(r"\br-\d{8}T\d{6}-[0-9a-f]{4}\b", told)[-1:] or [""]
    if not run:
        raise Failed(f"demo named no run: {told[-600:]}")
    say(f"{run} started after {time.monotonic() - began:.0f} s")
    say(f"before: {measure(run, options)}")
    docker("compose", "run", "--rm", "-T", "cli", "etude", "resume", run)
    say(f"first step after {until(lambda: steps(run) >= 1, 'the first step', options.patience):.0f} s more")
    for pair in filter(None, options.scale.split(",")):
        docker("compose", "up", "-d", "--wait", "--no-recreate", "--scale", pair, pair.partition("=")[0])
        say(f"scaled {pair}: {len(containers(pair.partition('=')[0]))} healthy")
    for service in options.kill:
        require_practice(run)
        say(f"kill -9 {service}: healthy again after {kill(service):.0f} s, step {steps(run):.0f}")
        time.sleep(SETTLE_S)
    for service in options.roll:
        require_practice(run)
        say(f"restarted {service}: drained, healthy again after {roll(service):.0f} s, step {steps(run):.0f}")
    if not options.stay:
        require_practice(run)
        before = steps(run)
        say(f"down and up again: healthy after {again(options.scale):.0f} s, step {before:.0f}")
        goes_on = until(
            lambda: steps(run) > before + 1 or over(run),  # one may have come before they were down
            f"the run's steps after {before:.0f}",
            options.patience,
        )
        say(f"the run went on after {goes_on:.0f} s more")
    until(lambda: over(run), f"the end of {run}", options.patience)
    report = audit(run)
    say(f"finished after {time.time() - wall:.0f} s, version {steps(run):.0f}")
    keys = ("lost", "trained_twice", "staleness_violations", "other_violations", "oldest_age")
    say(
        ", ".join(f"{key} {report[key]}" for key in keys)
        + f"; groups {report['groups']}; attempts {report['attempts']}"
    )
    say(f"after: {measure(run, options)}")
    wrong = check.findings(check.survey(PROMETHEUS, time.time() - wall + 60), check.QUIET)
    for line in (*wrong, *check.unhealthy_rules(PROMETHEUS)):
        say(line)
    return bool(report["sound"]) and not wrong


def main() -> int:
    options = arguments()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {text}", flush=True)

    try:
        held = rehearse(options, say)
    except Failed as error:
        say(str(error))
        held = False
    if options.down:
        docker("compose", "down")
    say("all held" if held else "not all held")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
