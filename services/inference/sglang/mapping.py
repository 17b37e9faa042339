"""Our /generate contract to SGLang's and back. Pure.

The contract is SGLang's in most; what differs, and is settled here (SGLang `flags.WRITTEN_FOR`):

- `ignore_eos` true also ignores `stop_token_ids`. So it is false where there are any, and that nothing else stops a
  generation is the doing of the folder that is served: it names no end-of-text token (`files`).
- A prompt id beyond the vocabulary takes the whole server down, and so it is refused here.
- More tokens than the context has room for are refused there; our engine ends at the context, and so they are cut here.
- Without a seed every request draws with the same one where inference is deterministic. So there always is one.
- An abort takes all requests whose id begins with the one that it names. So ids are sent in a prefix-free code.
- A server that we did not start keeps its cache when another run, whose serials begin anew, is loaded into it. So keys are
  sent with the name of a lineage before them.
- What a step samples while an update pauses it is booked under the new version, and of an update before a request's first
  token nothing is booked at all. Spans are cut `lag` tokens later, and the first begins with what served when the request came,
  so that a token may be said to be of a version before, and never of one that did not exist when it was sampled.
- `oldest_kv_version` is ours: an engine that keeps its cache over a swap, keyed by the version that a session began
  under, has read nothing older than that. One that flushes it (`flush_on_swap`) has read nothing older than what sampled.
- A session whose cache was given up for want of room computes it again, its experts' routing with it. With the weights that
  sampled, that is what it was but for rounding. Over a swap it is another version's than the log-probabilities are of: such an
  answer is none where routing was asked for, and "not now" instead (`flush_on_swap` asks for just that, and gets it).
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from services.inference.wire import BadRequest, GenerateRequest, SamplingParams, Unavailable, key_of

COLDEST = 1e-6
ROUNDING = 1e-4  # SGLang's log-probability of a certain token may lie so far above 0
_META = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BadAnswer(RuntimeError):
    """SGLang answered with something that cannot be passed on as it is; the text says what."""


class ComputedAgain(Unavailable):
    """Log-probabilities are of one version, routing of another."""


class _Reply(msgspec.Struct):
    meta_info: msgspec.Raw
    output_ids: list[int] = []


class _Span(msgspec.Struct):
    version: str | int
    start: int
    end: int


_REPLY = msgspec.json.Decoder(_Reply)


def sent_rid(rid: str) -> str:
    """`rid` in a prefix-free code: no sent id begins with another."""
    return f"{len(rid)}:{rid}"


def request_body(
    rid: str,
    asked: GenerateRequest,
    sampling: SamplingParams,
    *,
    vocabulary: int,
    context: int,
    serial: int,
    routing: bool,
    seed: int,
    lineage: str,
) -> bytes:
    """The body for SGLang. `context`: positions per session; `serial`: what serves now; `routing`: the model has experts;
    `seed`: for a request without one; `lineage`: whose versions the serials are. Raises BadRequest, in the words of the
    embedded engine."""
    tokens = asked.input_ids
    if not 0 < len(tokens) <= context:
        raise BadRequest(f"input_ids has {len(tokens)} tokens; allowed: 1..{context}")
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        raise BadRequest(f"input_ids: found {max(tokens)} or a negative id; allowed: 0..{vocabulary - 1}")
    stops = sampling.stop_token_ids or []
    body: dict[str, Any] = {
        "input_ids": tokens,
        "rid": sent_rid(rid),
        "extra_key": f"{lineage}/{key_of(asked, serial)}",
        "return_logprob": True,
        "stream": asked.stream,
        "sampling_params": {
            # Below COLDEST it samples greedily and says log-probabilities at 1, as our engine does at 0 alone.
            "temperature": max(sampling.temperature, COLDEST) if sampling.temperature else 0.0,
            "max_new_tokens": min(sampling.max_new_tokens, context + 1 - len(tokens)),
            "stop_token_ids": stops,
            "ignore_eos": not stops,
            "sampling_seed": sampling.sampling_seed if sampling.sampling_seed is not None else seed,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
        },
    }
    if asked.return_routed_experts and routing:
        body |= {"return_routed_experts": True, "routed_experts_start_len": asked.routed_experts_start_len}
    return msgspec.json.encode(body)


def answer(
    data: bytes,
    rid: str,
    asked: GenerateRequest,
    sampling: SamplingParams,
    *,
    serial: int,
    routing: bool,
    lag: int = 0,
    flushes: bool = False,
) -> dict[str, Any]:
    """Our answer, ready to be encoded; what is large stays as it came. `serial`: what served when it was asked. `lag`: see
    `flags.overlap_lag`. `flushes`: no swap leaves anything in the cache. Raises BadAnswer, ComputedAgain."""
    try:
        reply = _REPLY.decode(data)
        meta = _META.decode(reply.meta_info)
        return _answer(reply.output_ids, meta, rid, asked, sampling, serial, routing, lag, flushes)
    except msgspec.DecodeError as error:
        raise BadAnswer(f"/generate: {error}") from None


def _answer(
    tokens: list[int],
    meta: dict[str, msgspec.Raw],
    rid: str,
    asked: GenerateRequest,
    sampling: SamplingParams,
    serial: int,
    routing: bool,
    lag: int,
    flushes: bool,
) -> dict[str, Any]:
    spans = _cut_later(_spans(meta, len(tokens)), lag, serial)
    retracted = _read(meta, "num_retractions", int, 0)
    if asked.return_routed_experts and routing and retracted and len(spans) > 1 and not flushes:
        versions = " and ".join(str(span.version) for span in spans)
        raise ComputedAgain(
            f"SGLang computed the session again over a swap (versions {versions}), and its routing is not that of the passes "
            "that sampled; ask again"
        )
    began = None if flushes else key_of(asked, serial)
    newest = spans[-1].version if spans else _read(meta, "weight_version", str | int, str(serial))
    mine: dict[str, Any] = {
        "id": rid,
        "extra_key": key_of(asked, serial),
        "finish_reason": _finish(_read(meta, "finish_reason", dict[str, Any] | None, None), tokens, sampling),
        "prompt_tokens": _read(meta, "prompt_tokens", int, len(asked.input_ids)),
        "completion_tokens": len(tokens),
        "cached_tokens": _read(meta, "cached_tokens", int, 0),
        "weight_version": str(newest),
        "weight_versions": [{"version": str(s.version), "start": s.start, "end": s.end} for s in spans],
        "oldest_kv_version": _oldest(began, serial, [_serial(s.version) for s in spans]),
    }
    if asked.return_logprob:
        pairs = _read(meta, "output_token_logprobs", list[tuple[float, int, Any]], [])
        if [token for _, token, _ in pairs] != tokens:
            raise BadAnswer(
                f"/generate: {len(tokens)} output_ids, but log-probabilities of {len(pairs)} or of other tokens"
            )
        if (most := max((p for p, _, _ in pairs), default=0.0)) > ROUNDING:
            raise BadAnswer(f"/generate: found a log-probability of {most:.3g}; allowed: at most 0")
        mine["input_token_logprobs"] = []  # those of the prompt are refused
        mine["output_token_logprobs"] = [(min(p, 0.0), token, more) for p, token, more in pairs]
    if asked.return_routed_experts:  # "" where there are none: the embedded engine's answer of a dense model
        if routing and "routed_experts" not in meta and tokens:
            raise BadAnswer("/generate: no routed_experts; start SGLang with --enable-return-routed-experts")
        mine["routed_experts"] = meta.get("routed_experts", "")
    mine |= {name: value for name, value in meta.items() if name.startswith("spec_") or name == "num_retractions"}
    return {"text": "", "output_ids": tokens, "meta_info": mine}


def _read(meta: dict[str, msgspec.Raw], name: str, kind: Any, default: Any) -> Any:
    return msgspec.json.decode(meta[name], type=kind) if name in meta else default


def _spans(meta: dict[str, msgspec.Raw], n: int) -> list[_Span]:
    """Which version sampled which of the n tokens; together they cover them all."""
    if not n:
        return []
    spans: list[_Span] = _read(meta, "weight_versions", list[_Span] | None, None) or [
        _Span(_read(meta, "weight_version", str | int, "none"), 0, n)
    ]
    at = 0
    for span in spans:
        _serial(span.version)
        if span.start != at or span.end <= at:
            raise BadAnswer(f"/generate: weight_versions do not cover the {n} sampled tokens one after another")
        at = span.end
    if at != n:
        raise BadAnswer(f"/generate: weight_versions end at {at} of {n} sampled tokens")
    return spans


def _cut_later(spans: list[_Span], lag: int, serial: int) -> list[_Span]:
    """The same versions, each but the first beginning `lag` tokens later; one that has none left is left out. The first is
    `serial`, what served when the request came: where another one is booked from the first token on, it was swapped before."""
    if not lag or not spans:
        return spans
    if _serial(spans[0].version) != serial:
        spans = [_Span(serial, 0, 0), *spans]
    n = spans[-1].end
    starts = [0, *(min(n, span.start + lag) for span in spans[1:]), n]
    moved = [_Span(span.version, a, b) for span, (a, b) in zip(spans, itertools.pairwise(starts), strict=True)]
    return [span for span in moved if span.end > span.start]


def _serial(version: str | int) -> int:
    try:
        return int(version)
    except ValueError:
        raise BadAnswer(f"/generate: weight version {version!r}; expected the serial of a published version") from None


def _oldest(began: str | None, serial: int, versions: list[int]) -> int:
    """The version that the key of a kept session names (None: none is kept), or the oldest that sampled."""
    named = (began or "").removeprefix("@")
    return min([*versions, int(named)] if named.isdecimal() else versions, default=serial)


def _finish(reason: dict[str, Any] | None, tokens: list[int], sampling: SamplingParams) -> dict[str, Any]:
    kind = (reason or {}).get("type")
    if reason is None or kind == "abort":
        return {"type": "abort", "message": str((reason or {}).get("message") or "SGLang gave no reason")}
    if kind == "length":
        return {"type": "length", "length": len(tokens)}
    matched = reason.get("matched")
    if kind != "stop" or matched not in (sampling.stop_token_ids or []):
        raise BadAnswer(
            f"/generate: ended by {kind!r} at {matched!r}, which the request did not name; serve a folder without an "
            "end-of-text token, and no tokenizer (--skip-tokenizer-init)"
        )
    return {"type": "stop", "matched": matched}


def failure(status: int, data: bytes) -> Exception:
    """What a status other than 200 means for the client: its own mistake, not now, or a failure of the engine."""
    text = _message(data)
    if status == 400:
        return BadRequest(text)
    if status in (429, 503):
        return Unavailable(text)
    return BadAnswer(f"/generate: HTTP {status}: {text}")


def _message(data: bytes) -> str:
    try:
        body = msgspec.json.decode(data)
    except msgspec.DecodeError:
        body = None
    if isinstance(body, dict):
        found = body.get("error", body.get("detail", body.get("message")))
        if isinstance(found, dict):
            found = found.get("message")
        if found:
            return str(found)[:2000]
    return data[:500].decode(errors="replace") or "no reason given"


def stream_part(data: bytes, rid: str) -> tuple[list[int], bool]:
    """One event of a stream: the tokens so far, and whether it is the last. Raises BadAnswer."""
    try:
        reply = _REPLY.decode(data)
        finish = _read(_META.decode(reply.meta_info), "finish_reason", dict[str, Any] | None, None)
    except msgspec.DecodeError as error:
        raise BadAnswer(f"/generate of {rid}: {error}: {_message(data)}") from None
    return reply.output_ids, finish is not None
