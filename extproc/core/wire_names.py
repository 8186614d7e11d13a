"""The names that the sidecar, Envoy's configuration and the Lua filters agree on; nothing else."""

from __future__ import annotations

from typing import Final

PREFIX: Final = "x-pointsman-"

# Request headers that steer, set by the sidecar (or by ingress.lua when it was passed by).
CHAIN: Final = "x-pointsman-chain"
ROUTE: Final = "x-pointsman-route"
REASON: Final = "x-pointsman-reason"
MODEL: Final = "x-pointsman-model"
MODEL_SPAN: Final = "x-pointsman-model-span"
STREAM: Final = "x-pointsman-stream"
SKIP: Final = "x-pointsman-skip"
ADMISSION: Final = "x-pointsman-admission"

CONTENT_TYPE: Final = "content-type"
READ: Final = frozenset({":method", ":path", CONTENT_TYPE, "content-encoding", "x-request-id"})
"""The request headers that the sidecar reads, beside those that rules name; Envoy sends no others."""
CLIENT: Final = "x-pointsman-client"
"""The id of the client whose key opened the gateway, set by Envoy."""

WATCH: Final = "x-pointsman-watch"
"""Set by a sidecar that is there to hold a stream's headers until its first chunk."""

WATCH_MS: Final = "pointsman-watch-ms"
"""Metadata of a watch's own stream: how long the sidecar may hold headers back."""

# Request headers that Envoy's own filters keep for the account.
UPSTREAM: Final = "x-pointsman-upstream"
ATTEMPTS: Final = "x-pointsman-attempts"
FALLBACK: Final = "x-pointsman-fallback"

# Response headers between tier, chain and ingress; never seen by a client.
FAIL: Final = "x-pointsman-fail"
STATUS: Final = "x-pointsman-status"

# Access log names.
LOG_REQUEST: Final = "request"
LOG_ATTEMPT_PREFIX: Final = "attempt."

METADATA: Final = "pointsman"
"""The namespace of our endpoint and dynamic metadata."""

ADMITTED: Final = "admitted"
"""In a request's dynamic metadata from where our filters begin. Without it Envoy refused at once, and
headers in our name are the client's."""

# Keys of an attempt's dynamic metadata: copies of request headers, and usage as the provider says it.
KEPT_ROUTE: Final = "route"
KEPT_ADMISSION: Final = "admission"
PROMPT_TOKENS: Final = "prompt_tokens"
COMPLETION_TOKENS: Final = "completion_tokens"

FIRST_CHUNK_US: Final = "first_chunk_us"
"""A tag of an attempt's record: from its start to the first byte of the body, in microseconds."""

RULE: Final = "rule"
"""The pseudo-upstream that answers last."""

EXPLICIT_ROUTE: Final = "explicit"
"""The route of a request that named its own upstream; no configured route may take the name."""

MODEL_PATHS: Final = ("/completions", "/embeddings", "/responses", "/messages", "/generate")
"""Paths whose body is a JSON object with a `model`; on others one that is there is rewritten, and
none is added."""
