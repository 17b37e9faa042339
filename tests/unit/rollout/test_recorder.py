"""Any sequence of turns gives arrays that hold the invariants of shared/contracts/trajectory.py."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.generation import Generation
from services.rollout.recorder import Part, Recorder
from shared.contracts.messages import AttemptKey, Effort, StopReason
from shared.contracts.trajectory import Trajectory, pack, pack_routing, routing_rows, unpack, unpack_routing

LAYERS, K = 2, 2
token = st.integers(0, 999)
tokens = st.lists(token, min_size=1, max_size=6)


@dataclass
class Turn:
    sampled: list[int]
    observed: list[int]
    version: int
    summary: bool


turn = st.builds(Turn, tokens, st.lists(token, max_size=4), st.integers(0, 9), st.booleans())


def routing_of(sequence: list[int]) -> np.ndarray:
    """The routing that the reference engine gives: a function of position and token, a row per token but the last."""
    rows = [[[(t + i + layer + k) % 8 for k in range(K)] for layer in range(LAYERS)] for i, t in enumerate(sequence)]
    return np.array(rows[:-1], dtype=np.uint8).reshape(-1, LAYERS, K)


def generation(context: list[int], sampled: list[int], version: int, first_row: int) -> Generation:
    return Generation(
        tokens=sampled,
        logprobs_N=-np.arange(len(sampled), dtype=np.float32),
        versions_N=np.full(len(sampled), version, dtype=np.int32),
        oldest_kv_version=version,
        experts_RLK=routing_of(context + sampled)[first_row:],
    )


@given(prompt=tokens, turns=st.lists(turn, max_size=8))
def test_any_sequence_of_turns_gives_segments_that_hold_the_invariants(prompt: list[int], turns: list[Turn]) -> None:
    recorder = Recorder()
    recorder.begin(prompt)
    sent: list[list[int]] = [list(prompt)]  # per segment, what the engine has seen, kept independently
    seen: list[list[int]] = [list(prompt)]  # … up to the last sampled token
    masks: list[list[bool]] = [[False] * len(prompt)]
    for i, t in enumerate(turns):
        assert recorder.context == sent[-1]
        recorder.sampled(
            generation(sent[-1], t.sampled, t.version, recorder.rows), [Part(0, 1, "tool_call", "edit")], i
        )
        sent[-1] += t.sampled
        masks[-1] += [True] * len(t.sampled)
        seen[-1] = list(sent[-1])
        if t.summary:
            start = [1, *t.sampled, 2]
            recorder.begin(start, t.sampled)
            sent.append(list(start))
            seen.append([])
            masks.append([False] * len(start))
        else:
            recorder.observed(t.observed, i)
            sent[-1] += t.observed
            masks[-1] += [False] * len(t.observed)
    expected = [(s, m[: len(s)]) for s, m in zip(seen, masks, strict=True) if any(m)]
    segments = recorder.segments()
    assert [s.tokens.tolist() for s in segments] == [s for s, _ in expected]
    assert [s.loss_mask.tolist() for s in segments] == [m for _, m in expected]
    for segment in segments:
        segment.check()
        assert segment.loss_mask[-1]  # nothing that no engine ever saw
        assert (segment.versions[~segment.loss_mask] == -1).all()
        assert (segment.logprobs[~segment.loss_mask] == 0).all()
        assert segment.oldest_kv_version == segment.versions[segment.loss_mask].min()
        spans = segment.spans
        assert [s.start for s in spans] == [0, *(s.end for s in spans[:-1])]
        assert spans[-1].end == len(segment.tokens)
        for span in spans:
            assert segment.loss_mask[span.start : span.end].all() == (span.role in ("thinking", "tool_call"))
    rows = recorder.routing()
    if segments:
        assert rows is not None
        for segment, experts_TLK in zip(segments, rows, strict=True):
            np.testing.assert_array_equal(experts_TLK, routing_of(segment.tokens.tolist()))
        versions = [v for s in segments for v in s.versions[s.loss_mask].tolist()]
        assert (recorder.oldest_version, recorder.newest_version) == (min(versions), max(versions))
        trajectory = Trajectory(
            key=AttemptKey(attempt="a", epoch=0, group="g", problem="p"),
            stop=StopReason.submitted,
            temperature=1.0,
            effort=Effort(),
            segments=segments,
        )
        assert [s.tokens.tolist() for s in unpack(pack(trajectory)).segments] == [s.tokens.tolist() for s in segments]
        packed = pack_routing(rows)
        for i, (a, b) in enumerate(zip(unpack_routing(packed), rows, strict=True)):
            np.testing.assert_array_equal(a, b)
            for first, count in ((0, len(b)), (1, 2), (len(b), 3), (0, 10**9)):
                part = routing_rows(io.BytesIO(packed), i, first, count)
                np.testing.assert_array_equal(part, b[first : first + count])
    else:
        assert rows is None
        assert recorder.oldest_version == -1


def test_routing_rows_are_write_once() -> None:
    """A later pass that would route an earlier position otherwise changes nothing: it is asked only for what is new."""
    recorder = Recorder()
    recorder.begin([5, 6, 7])
    recorder.sampled(generation([5, 6, 7], [8, 9], 1, recorder.rows), [], 1)
    first = recorder.routing()
    recorder.observed([3], 1)
    assert recorder.rows == 4
    later = generation([5, 6, 7, 8, 9, 3], [4], 2, recorder.rows)
    recorder.sampled(later, [], 2)
    assert first is not None
    rows = recorder.routing()
    assert rows is not None
    np.testing.assert_array_equal(rows[0][:4], first[0])
    np.testing.assert_array_equal(rows[0][4:], later.experts_RLK)


def test_routing_that_does_not_fit_is_refused() -> None:
    recorder = Recorder()
    recorder.begin([5, 6, 7])
    with pytest.raises(ValueError, match="routing rows"):
        recorder.sampled(generation([5, 6, 7], [8], 1, first_row=1), [], 1)


def test_the_summary_stands_in_the_next_segment_with_mask_0_and_its_own_span() -> None:
    recorder = Recorder()
    recorder.begin([1, 2])
    recorder.sampled(generation([1, 2], [7, 8, 9], 3, 0), [Part(0, 3, "summary", "summary")], 1)
    recorder.begin([1, 7, 8, 9, 2], [7, 8, 9])
    recorder.sampled(generation([1, 7, 8, 9, 2], [4], 4, 0), [], 2)
    first, second = recorder.segments()
    assert first.loss_mask.tolist() == [False, False, True, True, True]
    assert second.loss_mask.tolist() == [False] * 5 + [True]
    assert [(s.role, s.start, s.end) for s in second.spans] == [
        ("prompt", 0, 1),
        ("summary", 1, 4),
        ("prompt", 4, 5),
        ("thinking", 5, 6),
    ]
    assert (recorder.oldest_version, recorder.newest_version) == (3, 4)


def test_a_summary_that_the_prompt_does_not_hold_as_it_is_is_refused() -> None:
    with pytest.raises(ValueError, match="summary"):
        Recorder().begin([1, 7, 8, 2], [7, 9])


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    frame = zstandard.ZstdCompressor(level=1).compress(b"x" * 100)
    assert frame[4] & 0xC0 == 0
    assert frame[4] & 0x20
    bomb = (
        frame[:4] + bytes([frame[4] | 0xC0]) + (1 << 40).to_bytes(8, "little") + frame[6:]
    )  # says that it holds 1 TiB
    with pytest.raises(ValueError, match="1099511627776 bytes unpacked"):
        unpack_routing(bomb)
    with pytest.raises(ValueError, match="not a trajectory"):
        unpack(bomb)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_range_of_routing_is_read_whatever_its_width_and_damage_is_refused(kind: type[np.unsignedinteger]) -> None:
    rows = [np.arange(n * 4, dtype=kind).reshape(n, 2, 2) for n in (5, 300)]
    packed = pack_routing(rows)
    np.testing.assert_array_equal(routing_rows(io.BytesIO(packed), 1, 100, 50), rows[1][100:150])
    foreign = zstandard.compress((1 << 40).to_bytes(8, "little"))
    for data, segment in ((packed[:-40], 1), (packed, 2), (b"no zstd", 0), (b"", 0), (foreign, 0), (packed, -1)):
        with pytest.raises(ValueError, match="no routing of segment"):
            routing_rows(io.BytesIO(data), segment, 0, 300)
