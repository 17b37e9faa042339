"""SGLang's HTTP API, as far as this service uses it. Every failure is a `ServerLost` or a `ServerRefused`."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

CONNECT_S = 5.0


class ServerLost(RuntimeError):
    """No answer: the server is not there (any more), or took too long."""


class ServerRefused(RuntimeError):
    """The server answered that it will not, or could not."""


class Client:
    """One connection pool, once it is open. `url` may change when the server is started again."""

    def __init__(self, url: str = "") -> None:
        self.url = url
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("SGLang client: open it first")
        return self._session

    # -- state ---------------------------------------------------------------------------------------------------------

    async def healthy(self, limit_s: float) -> bool:
        """Whether a forward pass went through (the server runs one of its own when it is idle). Takes a second."""
        try:
            timeout = aiohttp.ClientTimeout(total=limit_s)
            async with self.session.get(f"{self.url}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def there(self, limit_s: float) -> bool:
        """Whether it answers at all, paused or not."""
        try:
            await self._json("GET", "/model_info", None, limit_s)
        except (ServerLost, ServerRefused):
            return False
        return True

    async def server_info(self) -> dict[str, Any]:
        return await self._json("GET", "/server_info", None, CONNECT_S * 4)

    async def metrics(self) -> str:
        async with self.session.get(f"{self.url}/metrics", timeout=aiohttp.ClientTimeout(total=CONNECT_S)) as response:
            return await response.text()

    # -- control -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: str, limit_s: float) -> None:
        """in_place: running requests stand still with their cache, and so does the routing that was recorded for them. retract:
        they give their cache up, and wait to compute it again."""
        await self._json("POST", "/pause_generation", {"mode": mode}, limit_s)

    async def settle(self, limit_s: float) -> None:
        """After a pause: returns when the forward pass in hand is over. A pause itself only keeps the next one from being
        launched; a check of weights that leaves out every one of them waits for the device, and costs nothing else."""
        await self._json("POST", "/weights_checker", {"action": "checksum", "skip_tensor_list": [""]}, limit_s)

    async def proceed(self, limit_s: float) -> None:
        await self._json("POST", "/continue_generation", {}, limit_s)

    async def update(self, folder: str, serial: int, limit_s: float, *, flush: bool) -> None:
        """Loads a folder over the weights that serve, drafts included. Only while paused: then it begins at once.

        Of SGLang's ways to load, this one alone rereads everything (weights that were packed after loading included),
        needs no tensors in a pickle, and serves every rank and copy from one call. `flush` empties the cache, and is only for
        what was paused by `retract`: where requests stand still with theirs it is answered with 400 although the weights
        changed. Without it the cache stays: its entries are keyed by lineage and version.
        """
        body = {"model_path": folder, "load_format": "safetensors", "weight_version": str(serial), "flush_cache": flush}
        await self._json("POST", "/update_weights_from_disk", body, limit_s)

    async def checksums(self, limit_s: float) -> list[dict[str, Any]]:
        """One entry a rank: {checksums: {name: 16 hex digits}, parallelism_info}. Drafts' names begin with `draft.`."""
        answer = await self._json("POST", "/weights_checker", {"action": "checksum"}, limit_s)
        ranks = answer.get("ranks")
        if not isinstance(ranks, list) or not ranks:
            raise ServerRefused(f"/weights_checker: no checksums in {str(answer)[:300]}")
        return ranks

    async def abort(self, rid: str) -> None:
        await self._json("POST", "/abort_request", {"rid": rid}, CONNECT_S)

    async def abort_all(self) -> None:
        await self._json("POST", "/abort_request", {"abort_all": True}, CONNECT_S)

    async def flush(self) -> None:
        await self._json("POST", "/flush_cache", {}, CONNECT_S * 4)

    async def _json(self, method: str, path: str, body: dict[str, Any] | None, limit_s: float) -> dict[str, Any]:
        try:
            async with self.session.request(
                method,
                self.url + path,
                data=None if body is None else msgspec.json.encode(body),
                headers={"Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S),
            ) as response:
                status, data = response.status, await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"{path}: {type(error).__name__}: {error}") from None
        except TimeoutError:
            raise ServerLost(f"{path}: no answer within {limit_s:g} s") from None
        try:
            found = msgspec.json.decode(data) if data else {}
        except msgspec.DecodeError:
            found = {}
        if status != 200 or (isinstance(found, dict) and found.get("success") is False):
            raise ServerRefused(f"{path}: HTTP {status}: {data[:1000].decode(errors='replace')}")
        return found if isinstance(found, dict) else {}
