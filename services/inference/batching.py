"""What the engine computes: which requests have a row, what a step feeds of each, and what becomes of what it samples.

Every step feeds one token of each decoding session (and its drafts) and up to `prefill_tokens` prompt tokens of sessions that
wait for their first, as one token-flat batch; so a long prompt delays the others by one chunk at most.

Invariants:
- One thread. Between two steps the model may be another's (`use`): no step ever sees two versions, and every token knows
  its own.
- Log-probabilities and routing are those of `shared.model` on the same tokens (tested), whatever the batch around them.
- Requests that share a prompt wait for the one that is computing it and copy its keys, values and routing.
- Speculation (`draft_tokens` > 0, a model with an MTP layer) changes no distribution: a step then feeds a session its newest
  token and its drafts, and keeps what the trunk accepts. `gated`: only where measured to pay. A seed gives the same tokens with
  drafts and without.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from itertools import accumulate

import numpy as np
import torch

from services.inference import metrics
from services.inference.attention import Chunk, StepAttention
from services.inference.cache import SlotCache
from services.inference.drafting import NO_ROWS, Computed, Drafter
from services.inference.fused import FusedStep, supports
from services.inference.gate import Gate
from services.inference.request import Finish, Request, Result
from services.inference.sampler import propose, sample, uniform
from services.inference.sessions import Decoding, Record, nothing
from services.inference.speculation import Draft, verify
from shared.model import Transformer

SHARE_AT_LEAST = 16  # tokens: waiting for another request's prefix pays from here
DRAFT_PROMPT = 64  # tokens of a prompt's end that the MTP layer gets to read: drafts need little, and prompts are long


class Batch:
    """`waiting`: requests without a row, in their order. `running`: how many have one."""

    def __init__(
        self,
        model: Transformer,
        serial: int,
        *,
        rows: int,
        positions: int,
        prefill_tokens: int,
        draft_tokens: int = 0,
        gated: bool = True,
    ) -> None:
        self.draft_tokens = draft_tokens if model.config.num_mtp_layers else 0
        self.prefill_tokens = prefill_tokens
        weight = model.embed_tokens.weight
        self.cache = SlotCache(
            model.config,
            rows=rows,
            positions=positions,
            mtp=self.draft_tokens > 0,
            device=weight.device,
            dtype=weight.dtype,
        )
        self.steps = 0
        self.waiting: deque[Request] = deque()
        self._prefilling: list[Request] = []
        self._decoding = Decoding()
        self._records: dict[Request, Record] = {}  # every request that has a row
        self._gate = Gate(1 + self.draft_tokens) if gated else None
        self._drafted = False  # some session has drafts in hand
        self._random = np.random.default_rng()
        fused = self.compiled(model)
        if fused is not None:
            fused.warm()
        self.use(model, serial, fused)
        # Compiles them before anybody waits.
        sample(torch.zeros(1, 2), np.ones(1), np.zeros(1))
        if self.draft_tokens:
            _, even = propose(torch.zeros(1, 2), np.ones(1), np.zeros(1))
            verify(torch.zeros(2, 2), [Draft([0], even)], np.ones(1), np.zeros(1, bool), np.zeros(2), self._random)

    def compiled(self, model: Transformer) -> FusedStep | None:
        """What `use` wants beside the model. Takes a moment, and may be made beside the thread that steps."""
        return FusedStep(model, self.cache) if supports(model) else None

    def use(self, model: Transformer, serial: int, fused: FusedStep | None) -> None:
        """From the next step on, `model` samples; running sessions keep their cache."""
        self.model, self.serial, self._fused = model, serial, fused
        self.drafter = Drafter(model, self.cache, fused, self.draft_tokens)

    @property
    def running(self) -> int:
        return len(self._records)

    def admit(self) -> None:
        """Gives rows to requests in their order. One whose prompt is being computed by another waits for it, and lets those
        behind it pass."""
        passed: list[Request] = []
        try:
            self._admit(passed)
        finally:  # where there was no memory for a row, too: none is forgotten
            self.waiting.extendleft(reversed(passed))

    def prompts(self) -> frozenset[bytes]:
        """Of all that have a row; equal prompts are one."""
        return frozenset(request.tokens_P.tobytes() for request in self._records)

    def _admit(self, passed: list[Request]) -> None:
        """Leaves those that go on waiting in `passed`."""
        while self.waiting:
            request = self.waiting.popleft()
            passed.append(request)
            # While it waits another version may come: what it may use is settled with its row.
            request.key = f"@{self.serial}" if request.extra_key is None else request.extra_key
            if self._worth_waiting(request):
                continue
            taken = self.cache.take(request.tokens_P, request.key)
            if taken is None:
                break
            passed.pop()
            request.row, request.computed = taken
            request.cached_tokens = request.computed
            self._records[request] = Record()
            self._prefilling.append(request)
            metrics.PROMPT_TOKENS.inc(request.prompt_tokens)
            metrics.CACHED_TOKENS.inc(request.computed)

    def _worth_waiting(self, request: Request) -> bool:
        peers = [r for r in self._prefilling if r.key == request.key]
        if not peers:
            return False
        lengths = np.array([r.prompt_tokens for r in peers], np.int64)
        soon = self.cache.common_prefix([r.row for r in peers], lengths, request.tokens_P[:-1]).max()
        return bool(soon >= SHARE_AT_LEAST) and int(soon) > self.cache.match(request.tokens_P, request.key)[1]

    def step(self) -> None:
        """One forward for all that run; then a token for each that is past its prompt, or more where drafts are accepted."""
        began, cache, decoding = time.perf_counter(), self.cache, self._decoding
        drafts = [self._records[r].draft for r in decoding.requests] if self._drafted else []
        feeds_D = self._feeds(decoding, drafts)  # tokens of each session in this step
        starts_D = cache.length[decoding.rows]
        at_D = np.cumsum(feeds_D) - feeds_D
        decode = int(feeds_D.sum())
        chunks, finishing = self._chunks()
        own_N = np.repeat(starts_D - at_D, feeds_D) + np.arange(decode)
        rows_N = np.concatenate([np.repeat(decoding.rows, feeds_D), *(np.full(c.n, c.row) for c in chunks)])
        positions_N = np.concatenate([own_N, *(np.arange(c.start, c.start + c.n) for c in chunks)])
        hidden, experts = self._forward(rows_N, positions_N, decoding, feeds_D, chunks)
        cache.versions[rows_N, positions_N] = self.serial
        cache.routing[rows_N, positions_N] = experts[:, : cache.routing.shape[2]]
        cache.length[decoding.rows] += 1
        ends = list(accumulate((c.n for c in chunks), initial=decode))[1:]  # of each chunk among the N
        ending = [(c, end) for c, end in zip(chunks, ends, strict=True) if c.row in finishing]
        for chunk in chunks:
            cache.length[chunk.row] = chunk.start + chunk.n
        self.steps += 1
        metrics.STEPS.inc()
        sampled: list[int] = []
        if decode or ending:
            whole = decode + len(ending) == len(rows_N)
            wanted = hidden if whole else hidden[[*range(decode), *(end - 1 for _, end in ending)]]
            sampled = self._sample(wanted, [finishing[c.row] for c, _ in ending], drafts)
        if not self.draft_tokens:
            return
        judged, proposed = any(drafts), False
        if judged:
            for request in self._decoding.requests:
                self._records[request].draft = None
        if self._gate is None or self._gate.wants(len(self._decoding.requests) + len(self._prefilling)):
            own = decoding.rows, starts_D, np.array(sampled[: len(decoding.rows)], np.int64), at_D
            proposed = self._propose(hidden, _with_prompts(own, ending))
        self._drafted = proposed
        if self._gate is not None and not chunks and proposed == judged:
            self._gate.observe(len(decoding.rows), judged, time.perf_counter() - began, sum(sampled))

    def _feeds(self, decoding: Decoding, drafts: list[Draft | None]) -> np.ndarray:
        """1 + its drafts per session, int64 [D]. Drafts are written behind the newest token."""
        feeds_D = np.ones(len(decoding.rows), np.int64)
        for i, draft in enumerate(drafts):
            if draft:
                row, k = decoding.rows[i], len(draft.tokens)
                start = self.cache.length[row] + 1
                self.cache.tokens[row, start : start + k] = draft.tokens
                feeds_D[i] += k
        return feeds_D

    def _forward(
        self, rows_N: np.ndarray, positions_N: np.ndarray, decoding: Decoding, feeds_D: np.ndarray, chunks: list[Chunk]
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Hidden states after the final norm [N, D], valid until the next one, and experts [N, L, K]."""
        cache = self.cache
        tokens_N = cache.tokens[rows_N, positions_N]
        if self._fused is not None:
            return self._fused.forward(tokens_N, rows_N, positions_N)
        single, starts_D = decoding.rows, cache.length[decoding.rows]
        if (feeds_D > 1).any():
            drafted = zip(decoding.rows.tolist(), starts_D.tolist(), feeds_D.tolist(), strict=True)
            chunks = [Chunk(*each) for each in drafted] + chunks
            single = starts_D = NO_ROWS
        attend = StepAttention(cache, single, starts_D, chunks)
        out = self.model(torch.from_numpy(tokens_N).to(cache.keys.device), attend.positions_N, attend)
        return out.hidden_ND, out.experts_NLK.cpu().numpy()

    def _chunks(self) -> tuple[list[Chunk], dict[int, Request]]:
        """Prompt pieces of this step, oldest request first, and the requests (by row) whose prompt ends with theirs."""
        chunks: list[Chunk] = []
        finishing: dict[int, Request] = {}
        budget = self.prefill_tokens
        for request in self._prefilling:
            n = min(budget, request.prompt_tokens - request.computed)
            if n <= 0:
                break
            chunks.append(Chunk(request.row, request.computed, n))
            request.computed += n
            budget -= n
            if request.computed == request.prompt_tokens:
                finishing[request.row] = request
        if finishing:
            self._prefilling = [r for r in self._prefilling if r.row not in finishing]
        return chunks, finishing

    def _sample(self, hidden_ND: torch.Tensor, joining: list[Request], drafts: list[Draft | None]) -> list[int]:
        """Draws for every decoding and joining session, whose hidden states come in this order (a session's newest token, its
        drafts); those that end leave. Returns how many tokens each got."""
        cache = self.cache
        if joining:
            self._decoding = Decoding.of(self._decoding.requests + joining, cache.positions)
        now, serial = self._decoding, self.serial
        positions = cache.length[now.rows]  # where the new tokens begin
        drafts = drafts + [None] * len(joining) if any(drafts) else []
        uniforms = self._uniforms(now.requests, positions, [1 + len(d.tokens) if d else 1 for d in drafts])
        logits = (self._fused or self.model).logits(hidden_ND)
        if drafts:
            seeded = np.array([r.seed is not None for r in now.requests])
            verdict = verify(logits, drafts, now.temperatures, seeded, uniforms, self._random)
            tokens, logprobs = verdict.tokens, verdict.logprobs
        else:
            ids, chosen = sample(logits, now.temperatures, uniforms)
            tokens, logprobs = [[t] for t in ids.tolist()], [[p] for p in chosen.tolist()]
        for request in joining:
            request.began = time.perf_counter()
            metrics.FIRST_TOKEN.observe(request.began - request.arrived)
        left: list[Request] = []
        ended: list[tuple[Request, Finish]] = []
        given: list[int] = []
        for request, position, last, new, chances in zip(
            now.requests, positions.tolist(), now.last.tolist(), tokens, logprobs, strict=True
        ):
            record, row, finish = self._records[request], request.row, None
            record.judged += record.draft is not None
            for i, (token, chance) in enumerate(zip(new, chances, strict=True)):
                cache.tokens[row, position + i] = token
                record.logprobs.append(chance)
                record.versions.append(serial)
                if request.progress is not None:
                    request.progress(token, chance, serial)
                if token in request.stop_tokens:
                    finish = Finish("stop", matched=token)
                elif position + i >= last:
                    finish = Finish("length")
                if finish:
                    break
            given.append(i + 1)
            cache.length[row] += i  # accepted drafts: their keys and values are there
            record.accepted += i
            if finish:
                ended.append((request, finish))
            else:
                left.append(request)
        metrics.GENERATED_TOKENS.inc(sum(given))
        for request, finish in ended:
            self._finish(request, finish)
        if len(left) < len(now.requests):
            self._decoding = Decoding.of(left, cache.positions)
        if drafts:
            _count(drafts, given)
        return given

    def _uniforms(self, requests: list[Request], positions: np.ndarray, counts: list[int]) -> np.ndarray:
        """A number in [0, 1) for each of `counts` (empty: one) tokens of every session, from `positions` on; a seeded session's are
        those of its seed, whatever the batch around it."""
        ends = np.cumsum(counts) if counts else np.arange(1, len(requests) + 1)
        uniforms = self._random.random(int(ends[-1]) if len(ends) else 0)
        for i, request in enumerate(requests):
            if request.seed is not None:
                n = counts[i] if counts else 1
                for j in range(n):
                    uniforms[ends[i] - n + j] = uniform(request.seed, int(positions[i]) + j)
        return uniforms

    def _propose(self, hidden_ND: torch.Tensor, computed: Computed) -> bool:
        """Drafts for the sessions that go on and have room for them. Returns whether there are any."""
        decoding = self._decoding
        room_D = decoding.last - self.cache.length[decoding.rows] - 1  # one more token comes with the drafts
        for_whom = np.flatnonzero(room_D > 0)
        if not len(for_whom):
            return False
        requests = [decoding.requests[i] for i in for_whom]
        at = {row: i for i, row in enumerate(computed.rows.tolist())}
        k = self.draft_tokens
        uniforms = self._uniforms(requests, self.cache.length[decoding.rows[for_whom]] + 1, [k] * len(requests))
        drafts = self.drafter.propose(
            hidden_ND,
            computed,
            np.array([at[r.row] for r in requests], np.int64),
            decoding.temperatures[for_whom],
            uniforms.reshape(len(requests), k),
        )
        for request, draft, room in zip(requests, drafts, room_D[for_whom].tolist(), strict=True):
            self._records[request].draft = draft.first(room)
        return True

    def _finish(self, request: Request, finish: Finish) -> None:
        """Reports and parks the row. The request is no longer in any list of the engine."""
        cache, row = self.cache, request.row
        record = self._records.pop(request)
        P, C, seen = request.prompt_tokens, len(record.logprobs), int(cache.length[row])
        routing = None
        if request.routing_start >= 0:
            routing = cache.routing[row, request.routing_start : seen].copy()
        result = Result(
            tokens_C=cache.tokens[row, P : P + C].copy(),
            logprobs_C=np.array(record.logprobs, np.float32),
            versions_C=np.array(record.versions, np.int32),
            routing=routing,
            prompt_tokens=P,
            cached_tokens=request.cached_tokens,
            finish=finish,
            oldest_kv_version=int(cache.versions[row, :seen].min()) if seen else self.serial,
            weight_version=self.serial,
            judged=record.judged,
            accepted=record.accepted,
        )
        cache.park(row)
        with contextlib.suppress(RuntimeError):  # the device is lost: no step will go through any more
            if not self._sound(result, row, seen):
                cache.wipe(row)
        if C > 1:
            metrics.BETWEEN_TOKENS.observe((time.perf_counter() - request.began) / (C - 1))
        metrics.FINISHED.labels(finish.type).inc()
        request.done(result)

    def _sound(self, result: Result, row: int, seen: int) -> bool:
        """Whether a row's keys and values are numbers: of weights that have none left they are not, and every token that saw them
        tells by its log-probability. What was cut off may have computed more than it sampled, and only that is looked at."""
        if not np.isfinite(result.logprobs_C).all():
            return False
        if result.finish.type != "abort":
            return True
        told = result.prompt_tokens + len(result.logprobs_C) - 1 if len(result.logprobs_C) else result.cached_tokens
        return self.cache.finite(row, told, seen + self.prefill_tokens)

    def abort(self, request: Request, message: str) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
            request.done(nothing(request, self.serial, message))
        elif request in self._records:
            self._prefilling = [r for r in self._prefilling if r is not request]
            if request in self._decoding.requests:
                left = [r for r in self._decoding.requests if r is not request]
                self._decoding = Decoding.of(left, self.cache.positions)
            self._finish(request, Finish("abort", message=message))

    def abort_all(self, message: str) -> None:
        for request in [*self.waiting, *self._records]:
            self.abort(request, message)


def _with_prompts(own: tuple[np.ndarray, ...], ending: list[tuple[Chunk, int]]) -> Computed:
    """What the decoding sessions computed (rows, starts, lengths, at), and the ends of prompts, each with its end among the N."""
    if not ending:
        return Computed(*own)
    lengths = [min(chunk.n, DRAFT_PROMPT) for chunk, _ in ending]
    pieces = [(c.row, c.start + c.n - n, n, end - n) for (c, end), n in zip(ending, lengths, strict=True)]
    return Computed(*(np.concatenate(both) for both in zip(own, np.array(pieces).T, strict=True)))


def _count(drafts: list[Draft | None], given: list[int]) -> None:
    """What was proposed and accepted, by place."""
    for place in range(max(len(d.tokens) for d in drafts if d)):
        metrics.DRAFTED.labels(place + 1).inc(sum(place < len(d.tokens) for d in drafts if d))
        metrics.ACCEPTED.labels(place + 1).inc(sum(place < n - 1 for d, n in zip(drafts, given, strict=True) if d))
