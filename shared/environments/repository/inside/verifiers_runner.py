"""Runs inside a sandbox, with the Python of a `verifiers` environment: lists its examples, or makes one rollout and scores it.

One order arrives on standard input, as one line of JSON (shared.environments.verifiers.orders). The answers leave on standard
output, one JSON object a line, each with the order's nonce.

Invariant: no program that the environment starts finds the nonce, the attempt's key or the way out. The process cannot be traced
or read by others of its user; its output is not inherited. Code that the environment executes in this very process can.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

LOG = "/tmp/etude-environment.log"  # what the environment prints
_SET_DUMPABLE = 4  # PR_SET_DUMPABLE of prctl(2)
_PROMPT = 1 << 16  # characters of a prompt that leave; the problem shows them to people
_DROPPED = ("n", "temperature")  # of an environment's own sampling arguments: the run decides them


class Refused(Exception):
    """The order cannot be carried out; the text says why."""


class Speaker:
    """Writes answers to the real standard output, which nothing else writes to any more."""

    def __init__(self, nonce: str, out: int) -> None:
        self._nonce, self._out = nonce, out

    def say(self, event: str, **fields: Any) -> None:
        line = json.dumps({"nonce": self._nonce, "said": {"event": event, **fields}}).encode() + b"\n"
        while line:
            line = line[os.write(self._out, line) :]


def order() -> dict[str, Any]:
    """Read the order: one line of JSON, after which nothing comes."""
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 16)
        if not part:
            raise SystemExit("found no order on standard input")
        line += part
    found: dict[str, Any] = json.loads(line)
    return found


def withdrawn(nonce: str) -> Speaker:
    """Close this process to others, and give what the environment prints a place of its own."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise SystemExit(f"prctl(PR_SET_DUMPABLE): {os.strerror(ctypes.get_errno())}")
    out = os.dup(1)  # which no program inherits
    log = os.open(LOG, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    return Speaker(nonce, out)


def loaded(name: str, arguments: dict[str, Any]) -> Any:
    """Return the environment. Raises Refused."""
    try:
        import verifiers
    except ImportError as error:
        raise Refused(f"found no package verifiers in {sys.prefix} ({error}); install it there") from None
    if not hasattr(verifiers, "load_environment"):
        version = getattr(verifiers, "__version__", "of an unknown version")
        raise Refused(
            f"found verifiers {version} without load_environment; allowed: verifiers 0.1, such as verifiers==0.1.14"
        )
    try:
        environment = verifiers.load_environment(name, **arguments)
    except BaseException as error:  # whatever a package does while it is imported
        raise Refused(f"environment {name!r:.100} cannot be loaded: {_chain(error)}") from None
    if getattr(environment, "requires_group_rollouts", False):
        raise Refused(f"environment {name!r:.100}: its rubric scores groups; allowed: rubrics that score one rollout")
    return environment


def rows(environment: Any, split: str) -> Any:
    """Return the examples of a split, as a sequence of mappings. Raises Refused."""
    try:
        return environment.get_dataset() if split == "train" else environment.get_eval_dataset()
    except BaseException as error:
        raise Refused(f"split {split!r}: its examples cannot be read: {_chain(error)}") from None


def digest(row: Mapping[str, Any]) -> str:
    """Return what tells an example from another one of the same index."""
    text = json.dumps(row.get("prompt"), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def prompt_text(row: Mapping[str, Any]) -> str:
    """Return the prompt for people."""
    prompt = row.get("prompt")
    if not isinstance(prompt, list):
        return str(prompt)
    return "\n\n".join(_text(message) for message in prompt if isinstance(message, Mapping))


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")


def list_examples(asked: dict[str, Any], speaker: Speaker) -> None:
    found = rows(loaded(asked["environment"], asked["arguments"]), asked["split"])
    first, most = asked["first"], asked["most"]
    for index in range(first, min(len(found), first + most)):
        row = found[index]
        speaker.say("example", index=index, digest=digest(row), prompt=prompt_text(row)[:_PROMPT])
    speaker.say("listed", examples=len(found))


async def roll_out(asked: dict[str, Any], speaker: Speaker) -> None:
    environment = loaded(asked["environment"], asked["arguments"])
    row = example(rows(environment, asked["split"]), asked)
    sampling = {
        name: value
        for name, value in (getattr(environment, "sampling_args", None) or {}).items()
        if name not in _DROPPED and value not in (None, {})
    }
    client = client_of(asked["url"], asked["key"])
    speaker.say("began")
    state = await environment.rollout(row, client, "etude", sampling)
    error = state.get("error")
    why, name = (_chain(error), type(error).__name__) if error else ("", "")
    speaker.say("rolled", turns=len(state.get("trajectory") or ()), error=name, why=why)
    await environment.rubric.score_rollout(state)
    metrics = {str(name): float(value) for name, value in (state.get("metrics") or {}).items()}
    speaker.say("scored", reward=repr(float(state["reward"])), metrics={k: repr(v) for k, v in metrics.items()})


def example(found: Any, asked: dict[str, Any]) -> Any:
    """Return the row that the order means. Raises Refused."""
    index = asked["index"]
    if not 0 <= index < len(found):
        raise Refused(f"field 'index': found {index}; allowed: 0 to {len(found) - 1} of split {asked['split']!r}")
    row = found[index]
    if asked["digest"] != digest(row):
        raise Refused(
            f"example {index} of split {asked['split']!r} has another prompt than when the problem was made; import it again"
        )
    return row


def client_of(url: str, key: str) -> Any:
    """Return a client of verifiers for the endpoint. A refused key (the attempt is over) ends a rollout, and no exception."""
    import openai
    import verifiers

    for name in ("no_proxy", "NO_PROXY"):  # the image may name a proxy, which does not know the endpoint
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))

    class Client(verifiers.OpenAIChatCompletionsClient):
        async def get_response(self, *args: Any, **fields: Any) -> Any:
            try:
                return await super().get_response(*args, **fields)
            except (openai.PermissionDeniedError, openai.AuthenticationError) as error:
                raise verifiers.ModelError(str(error)) from error

    return Client(openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=24 * 3600.0))


def _chain(error: BaseException) -> str:
    """Return an error with what caused it, the cause last."""
    said: list[str] = []
    at: BaseException | None = error
    while at is not None and len(said) < 5:
        said.append(f"{type(at).__name__}: {at}" if str(at) else type(at).__name__)
        at = at.__cause__ or at.__context__
    return " <- ".join(said)[:2000]


def main() -> None:
    asked = order()
    speaker = withdrawn(asked.pop("nonce"))
    try:
        if asked["act"] == "list":
            list_examples(asked, speaker)
        else:
            asyncio.run(roll_out(asked, speaker))
    except Refused as error:
        speaker.say("refused", why=str(error))
    except BaseException as error:  # of the environment's rollout or rubric
        speaker.say("broken", error=type(error).__name__, why=_chain(error))
    os._exit(0)  # an environment may leave threads behind


if __name__ == "__main__":
    main()
