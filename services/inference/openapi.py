"""The HTTP contract as an OpenAPI document, from the structs that read the requests (`GET /openapi.json`). Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from services.inference.wire import (
    AbortRequest,
    CheckerRequest,
    GenerateRequest,
    PauseRequest,
    PinRequest,
    SamplingParams,
    UpdateRequest,
)
from shared.chat.openai.structs import ChatRequest

# path -> (method, what reads the body, what it does)
OPERATIONS: dict[str, tuple[str, type[msgspec.Struct] | None, str]] = {
    "/generate": ("post", GenerateRequest, "Sample from token ids."),
    "/v1/chat/completions": (
        "post",
        ChatRequest,
        "Sample the next message of a conversation, as OpenAI's clients ask.",
    ),
    "/v1/models": ("get", None, "The one model that is served, as OpenAI's clients list them."),
    "/health": ("get", None, "Does the engine live?"),
    "/server_info": ("get", None, "What is served, and how busy the engine is."),
    "/get_server_info": ("get", None, "SGLang's older name of /server_info."),
    "/model_info": ("get", None, "Which policy, run and version."),
    "/get_model_info": ("get", None, "SGLang's older name of /model_info."),
    "/pause_generation": ("post", PauseRequest, "Stand still: `abort` ends what is running, `in_place` keeps it."),
    "/continue_generation": ("post", None, "Go on after a pause."),
    "/abort_request": ("post", AbortRequest, "End one generation, or all."),
    "/flush_cache": ("post", None, "Forget every parked session."),
    "/update_weights_from_disk": (
        "post",
        UpdateRequest,
        "Serve the weights of another folder, of the same architecture, where they come from no run.",
    ),
    "/weights_checker": ("post", CheckerRequest, "Checksum of the live weights."),
    "/pin": (
        "post",
        PinRequest,
        "Stay at one version of the run that is served, whatever comes after; -1: go by the settings again.",
    ),
}
CONFLICTS = frozenset({"/update_weights_from_disk"})  # these may not go with how the replica is used
_SCHEMAS = "#/components/schemas/{name}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        }
    },
}


def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    structs = [_told(body) for _, body, _ in OPERATIONS.values() if body is not None]
    _, schemas = msgspec.json.schema_components(structs, ref_template=_SCHEMAS)
    schemas["Error"] = _ERROR
    paths = {
        path: {method: _operation(path, method, body, about)} for path, (method, body, about) in OPERATIONS.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Étude inference", "version": "1"},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _told(body: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """/generate reads its sampling parameters raw, so that errors can name them: here they are what they must be."""
    if body is not GenerateRequest:
        return body
    fields: list[Any] = []
    for field in msgspec.structs.fields(body):
        if field.name == "sampling_params":
            fields.append((field.name, SamplingParams, msgspec.field(default_factory=SamplingParams)))
        else:
            fields.append((field.name, field.type) if field.required else (field.name, field.type, field.default))
    return msgspec.defstruct(body.__name__, fields, kw_only=True)


def _operation(path: str, method: str, body: type[msgspec.Struct] | None, about: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": about,
        "responses": {
            "200": {"description": "done"},
            "400": _refusal("the request is wrong: which field, what was found, what is allowed"),
            "503": _refusal("not now; Retry-After says when to ask again"),
        },
    }
    if path in CONFLICTS:
        operation["responses"]["409"] = _refusal("not from this replica, as it is used; the message says why")
    if method != "get":
        operation["responses"]["403"] = _refusal("a page of another site sent it")
    if body is not None:
        operation["responses"] |= {
            "408": _refusal("the body did not come in time"),
            "413": _refusal("the body is too large"),
        }
        schema = {"$ref": _SCHEMAS.format(name=body.__name__)}
        required = any(field.required for field in msgspec.structs.fields(body))
        operation["requestBody"] = {"required": required, "content": {"application/json": {"schema": schema}}}
    return operation


def _refusal(what: str) -> dict[str, Any]:
    schema = {"$ref": _SCHEMAS.format(name="Error")}
    return {"description": what, "content": {"application/json": {"schema": schema}}}
