"""`python -m tests.compose [--steps 20] [--kill all] [--scale rollout=2] [--problems 100] [--down]`

A run in docker compose on this machine: everything is started and must become healthy, `demo` starts a run, its policy is
measured, replicas are added, every container that is named is killed (kill -9 of its first process: the engine must start it
again), the run must end, its ledger is audited, its last version is measured, and Prometheus is asked every expression of the
dashboards. One line per event with its time; exit code 0 only if all of that held. (Whether the policy got better is told, not
judged: kills and few steps are no practice.) Needs the images (`docker compose build` or `make images`) and `.env`.
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


def measure(run: str, options: argparse.Namespace) -> str:
    """The newest version on the held-out problems: the last row of the table."""
    command = f"etude measure {run} --problems {options.problems} --samples 4"
    shown = docker("compose", "exec", "-T", "scheduler", *command.split())
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


def healthy(container: str, since: int) -> bool:
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


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.compose", description="A run in docker compose, rehearsed.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=20.0, help="the run's own end by time")
    parser.add_argument("--kill", default="all", help=f"by commas, of {', '.join((*OURS, *SERVERS))}; all; none")
    parser.add_argument("--scale", default="rollout=2,grader=2", help="by commas; empty: none")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds to the first step, and to the run's end")
    parser.add_argument("--problems", type=int, default=100, help="held-out problems, before and after")
    parser.add_argument("--down", action="store_true", help="`docker compose down` at the end; volumes are kept")
    options = parser.parse_args()
    named = {"all": (*OURS, *SERVERS), "none": ()}.get(options.kill, tuple(options.kill.split(",")))
    if unknown := set(named) - {*OURS, *SERVERS}:
        parser.error(f"--kill: found {sorted(unknown)[0]!r}; allowed: {', '.join((*OURS, *SERVERS))}, all, none")
    options.kill = named
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
    docker("compose", "exec", "-T", "scheduler", "etude", "resume", run)
    say(f"first step after {until(lambda: steps(run) >= 1, 'the first step', options.patience):.0f} s more")
    for pair in filter(None, options.scale.split(",")):
        docker("compose", "up", "-d", "--wait", "--no-recreate", "--scale", pair, pair.partition("=")[0])
        say(f"scaled {pair}: {len(containers(pair.partition('=')[0]))} healthy")
    for service in options.kill:
        say(f"kill -9 {service}: healthy again after {kill(service):.0f} s, step {steps(run):.0f}")
        time.sleep(SETTLE_S)
    until(lambda: audit(run)["state"] == "finished", f"the end of {run}", options.patience)
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
