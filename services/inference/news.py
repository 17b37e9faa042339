"""What a generation has sampled since somebody asked last, handed from the engine's thread to a stream.

The engine's thread only appends to a list. The stream looks every so often: a callback into the event loop for each token would
cost more than many models' tokens do.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from services.inference.request import Request
from services.inference.wire import version_spans


class News:
    """Of one request."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._sampled: list[tuple[int, float, int]] = []  # token, log-probability, serial
        self._told = 0
        request.progress = lambda token, logprob, serial: self._sampled.append((token, logprob, serial))

    def event(self) -> dict[str, Any] | None:
        """Return the event that tells what is new; None: nothing is. `new` marks it: `output_ids` go on where the last event's
        ended. `oldest_kv_version`: of what is told so far, and of the version that the key of its cache entries names."""
        end = len(self._sampled)
        if end == self._told:
            return None
        new, self._told = self._sampled[self._told : end], end
        key = self._request.key
        named = key.removeprefix("@")
        oldest = min(serial for _, _, serial in self._sampled[:end])
        meta = {
            "id": self._request.rid,
            "new": True,
            "finish_reason": None,
            "extra_key": key,
            "output_token_logprobs": [(logprob, token, None) for token, logprob, _ in new],
            "weight_versions": version_spans(np.array([serial for _, _, serial in new])),
            "oldest_kv_version": min(oldest, int(named)) if named.isdecimal() else oldest,
        }
        return {"text": "", "output_ids": [token for token, _, _ in new], "meta_info": meta}
