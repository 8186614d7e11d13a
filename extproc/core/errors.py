"""The closed sets of reasons, outcomes and client-facing errors; it knows no transport and no metric."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec


class RouteReason(StrEnum):
    """How a route was chosen: the value of `x-pointsman-reason` and of the `reason` metric label."""

    EXPLICIT = "explicit"
    HEADER = "header"
    CONTENT = "content"
    LENGTH = "length"
    KEYWORD = "keyword"
    PATTERN = "pattern"
    SEMANTIC = "semantic"
    DEFAULT = "default"
    DEGRADED_FAST = "degraded_fast"
    DEGRADED_DEADLINE = "degraded_deadline"
    DEGRADED_QUEUE_FULL = "degraded_queue_full"
    DEGRADED_WORKER = "degraded_worker"
    DEGRADED_BODY = "degraded_body"
    # The sidecar answered by itself: a rejection, the model list, an explained decision.
    LOCAL = "local"
    # Set by Envoy, never by the sidecar: the sidecar was dead or too slow and the request passed it by.
    DEGRADED_BYPASSED = "degraded_bypassed"


class Content(StrEnum):
    """What a body may hold besides text, as rules spell it."""

    IMAGES = "images"
    TOOLS = "tools"


class FallbackReason(StrEnum):
    """Why an upstream did not give the answer: `x-pointsman-fallback` and the metric label."""

    CIRCUIT_OPEN = "circuit_open"
    TIMEOUT = "timeout"
    SERVER_ERROR = "5xx"
    CONNECT_ERROR = "connect_error"
    RATE_LIMITED = "rate_limited"
    BAD_SCHEMA = "bad_schema"
    OVERFLOW = "overflow"
    CONTEXT_LENGTH = "context_length"


class Outcome(StrEnum):
    """Every request that reaches the listener ends in exactly one of these."""

    SERVED = "served"
    SERVED_BY_FALLBACK = "served_by_fallback"
    SERVED_BY_RULE = "served_by_rule"
    REJECTED = "rejected"
    FAILED = "failed"
    CLIENT_GONE = "client_gone"
    STREAM_CUT = "stream_cut"


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """One client-facing error: its HTTP status, OpenAI `type`, and our stable `code`."""

    code: str
    status: int
    type: str
    message: str
    param: str | None = None


_CLIENT: Final = "invalid_request_error"

EMPTY_BODY: Final = ErrorKind(
    "empty_body", 400, _CLIENT, "The request has no body; send a JSON object."
)
INVALID_JSON: Final = ErrorKind("invalid_json", 400, _CLIENT, "The request body is not valid JSON.")
NOT_AN_OBJECT: Final = ErrorKind(
    "body_not_object", 400, _CLIENT, "The request body must be a JSON object."
)
TOO_DEEP: Final = ErrorKind("body_too_deep", 400, _CLIENT, "The request body is nested too deeply.")
DUPLICATE_MODEL: Final = ErrorKind(
    "duplicate_model", 400, _CLIENT, "The key 'model' occurs more than once.", "model"
)
INVALID_MODEL: Final = ErrorKind(
    "invalid_model", 400, _CLIENT, "'model' must be a non-empty string.", "model"
)
INVALID_API_KEY: Final = ErrorKind(
    "invalid_api_key", 401, _CLIENT, "No API key was sent, or it is none of this gateway."
)
MODEL_NOT_FOUND: Final = ErrorKind(
    "model_not_found", 404, _CLIENT, "The model does not exist here.", "model"
)
INVALID_MESSAGES: Final = ErrorKind(
    "invalid_messages", 400, _CLIENT, "'messages' must be a list of objects.", "messages"
)
INVALID_PROMPT: Final = ErrorKind(
    "invalid_prompt", 400, _CLIENT, "'prompt' must be a non-empty string.", "prompt"
)
METHOD_NOT_ALLOWED: Final = ErrorKind("method_not_allowed", 405, _CLIENT, "This path takes POST.")
UNSUPPORTED_MEDIA_TYPE: Final = ErrorKind(
    "unsupported_media_type", 415, _CLIENT, "Send the body as application/json."
)
UNSUPPORTED_ENCODING: Final = ErrorKind(
    "unsupported_content_encoding",
    415,
    _CLIENT,
    "This content-encoding is not understood here; send the body plain.",
)
REQUEST_TOO_LARGE: Final = ErrorKind(
    "request_too_large", 413, _CLIENT, "The request body is over the limit of this gateway."
)
REQUEST_TIMEOUT: Final = ErrorKind(
    "request_timeout", 408, _CLIENT, "The request did not arrive in full in time."
)
BAD_REQUEST: Final = ErrorKind("bad_request", 400, _CLIENT, "The request is not valid HTTP.")
HEADERS_TOO_LARGE: Final = ErrorKind(
    "headers_too_large", 431, _CLIENT, "The request headers are over the limit of this gateway."
)
ROUTER_UNAVAILABLE: Final = ErrorKind(
    "router_unavailable", 503, "server_error", "The router does not answer; completions still work."
)
NO_UPSTREAM: Final = ErrorKind(
    "no_upstream_available", 503, "server_error", "No upstream could answer this request."
)
UPSTREAM_TIMEOUT: Final = ErrorKind(
    "upstream_timeout", 504, "server_error", "The upstream did not answer in time."
)
GATEWAY_ERROR: Final = ErrorKind(
    "gateway_error", 502, "server_error", "The gateway could not complete the request."
)


def error_body(kind: ErrorKind, *, message: str | None = None) -> bytes:
    """The OpenAI-shaped JSON for an error, as UTF-8 bytes."""
    error: dict[str, Any] = {
        "message": message or kind.message,
        "type": kind.type,
        "param": kind.param,
        "code": kind.code,
    }
    return msgspec.json.encode({"error": error})
