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

WATCH: Final = "x-pointsman-watch"
"""Set by a sidecar that is there to hold a stream's headers until its first chunk."""
ADMITTED: Final = "x-pointsman-admitted"
"""Set where the filters begin: what is refused without it, Envoy's codec refused."""

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

RULE: Final = "rule"
"""The pseudo-upstream that answers last."""

EXPLICIT_ROUTE: Final = "explicit"
"""The route of a request that named its own upstream; no configured route may take the name."""

COMPLETIONS_SUFFIX: Final = "/completions"
"""Paths that end so answer with `choices`; tier.lua checks the same suffix."""
