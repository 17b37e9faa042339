"""The HTTP contract that every engine serves: its paths and limits, and the answers that no engine has a part in."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from services.inference import openapi
from services.inference.errors import errors
from services.inference.live import Facts
from services.inference.wire import BadRequest, CheckerRequest, PauseRequest, PinRequest, decode

DISCONNECT_CHECK_S = 0.2  # one sweep over all open requests; a client that went away keeps its row no longer
MAX_BODY = 64 << 20
TOLD_OF_THE_MODEL = (
    "model_path",
    "weight_version",
    "run",
    "pool",
    "serial",
    "context_length",
    "vocab_size",
    "model_type",
)


class Contract(ABC):
    """Implements services.inference.live.Server. `more`: middlewares besides `errors`, inside of it."""

    def __init__(self, facts: Facts, *more: Middleware) -> None:
        self.draining = False
        self.idle = asyncio.Event()  # set while no generation is open
        self.idle.set()
        self._facts = facts
        self.app = web.Application(client_max_size=MAX_BODY, middlewares=[errors, *more])
        handlers = {
            "/generate": self.generate,
            "/health": self.health,
            "/get_server_info": self.server_info,
            "/server_info": self.server_info,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/pause_generation": self.pause,
            "/continue_generation": self.proceed,
            "/abort_request": self.abort,
            "/flush_cache": self.flush,
            "/weights_checker": self.weights_checker,
            "/pin": self.pin,
        }
        # Served is what is documented, by its method: the fuzz of the document reaches every handler.
        served = [getattr(web, method)(path, handlers[path]) for path, (method, _, _) in openapi.OPERATIONS.items()]
        self.app.add_routes([*served, web.get("/openapi.json", self.openapi)])

    # -- the engine's part -------------------------------------------------------------------------------------------

    @abstractmethod
    async def generate(self, http: web.Request) -> web.StreamResponse: ...

    @abstractmethod
    async def health(self, _: web.Request) -> web.Response: ...

    @abstractmethod
    async def abort(self, http: web.Request) -> web.Response: ...

    @abstractmethod
    def _ready(self) -> object:
        """Raises Unavailable while nothing can be served."""

    @abstractmethod
    def _info(self) -> dict[str, Any]: ...

    @abstractmethod
    async def _pause(self, mode: str) -> None:
        """Raises Unavailable. Mode "abort" ends what is running, "in_place" lets it stand still."""

    @abstractmethod
    async def _proceed(self) -> None: ...

    @abstractmethod
    async def _flush(self) -> None: ...

    # -- alike for all -----------------------------------------------------------------------------------------------

    async def server_info(self, _: web.Request) -> web.Response:
        return web.json_response(self._info())

    async def model_info(self, _: web.Request) -> web.Response:
        info = self._info()
        return web.json_response({"is_generation": True, **{k: info[k] for k in TOLD_OF_THE_MODEL if k in info}})

    async def pause(self, http: web.Request) -> web.Response:
        mode = decode(PauseRequest, await http.read()).mode
        if mode not in ("abort", "in_place"):
            raise BadRequest(f"mode: found {mode!r}; allowed: 'abort', 'in_place'")
        await self._pause(mode)
        return web.json_response({"status": "ok", "message": f"paused ({mode})"})

    async def proceed(self, _: web.Request) -> web.Response:
        await self._proceed()
        return web.json_response({"status": "ok", "message": "continued"})

    async def flush(self, _: web.Request) -> web.Response:
        await self._flush()
        return web.json_response({"success": True, "message": "every parked session is forgotten"})

    async def weights_checker(self, http: web.Request) -> web.Response:
        action = decode(CheckerRequest, await http.read()).action
        if action != "checksum":
            raise BadRequest(f"action: found {action!r}; allowed: 'checksum'")
        self._ready()
        return web.json_response({"success": True, "message": "", **await self._facts.checksums()})

    async def openapi(self, _: web.Request) -> web.Response:
        return web.json_response(openapi.document())

    async def pin(self, http: web.Request) -> web.Response:
        return web.json_response(await self._facts.pin(decode(PinRequest, await http.read()).serial))
