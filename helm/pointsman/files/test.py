"""What `helm test` does: the list of models, then one question; fails unless a model answered it."""  # noqa: INP001  a file of the chart

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

TIMEOUT_S = 120


def call(url: str, body: object = None) -> tuple[dict[str, str], Any]:
    """Headers in lower case, and the JSON. Raise OSError on any status that is no success."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310  a Service
        return {key.lower(): value for key, value in response.headers.items()}, json.load(response)


def main() -> str | None:
    base, alias = sys.argv[1:]
    _, models = call(f"{base}/v1/models")
    sys.stdout.write(f"models: {', '.join(model['id'] for model in models['data'])}\n")
    question = {"role": "user", "content": "Say hello."}
    headers, _ = call(
        f"{base}/v1/chat/completions", {"model": alias, "messages": [question], "max_tokens": 8}
    )
    for name in ("route", "reason", "upstream", "attempts"):
        sys.stdout.write(f"x-pointsman-{name}: {headers.get(f'x-pointsman-{name}')}\n")
    if headers.get("x-pointsman-upstream") == "rule":
        return (
            "no model answered, so the rule did: x-pointsman-attempts says what each upstream did"
        )
    if headers.get("x-pointsman-reason") == "degraded_bypassed":
        return "the sidecar did not decide: see the log of the container pointsman"
    return None


if __name__ == "__main__":
    sys.exit(main())
