"""What `helm test` does: the list of models, then one question; fails unless a model answered it."""  # noqa: INP001  a file of the chart

from __future__ import annotations

import argparse
import json
import ssl
import sys
import urllib.request
from pathlib import Path
from typing import Any

TIMEOUT_S = 120
HEADERS = {"content-type": "application/json"}
# The name of the Service is hardly in the certificate, which is made for those outside.
TLS = ssl._create_unverified_context()  # noqa: S323, SLF001


def first_key(keys_file: Path) -> str:
    lines = (line.split() for line in keys_file.read_text(encoding="utf-8-sig").splitlines())
    return next(words[1] for words in lines if words and not words[0].startswith("#"))


def call(url: str, body: object = None) -> tuple[dict[str, str], Any]:
    """Headers in lower case, and the JSON. Raise OSError on any status that is no success."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, HEADERS)  # noqa: S310
    tls = TLS if url.startswith("https:") else None
    with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=tls) as response:  # noqa: S310
        return {key.lower(): value for key, value in response.headers.items()}, json.load(response)


def main() -> str | None:
    parser = argparse.ArgumentParser()
    parser.add_argument("base")
    parser.add_argument("alias")
    parser.add_argument("--keys-file", type=Path)
    parser.add_argument("--certificate", type=Path)
    arguments = parser.parse_args()
    base, alias = arguments.base, arguments.alias
    if arguments.keys_file:
        HEADERS["authorization"] = f"Bearer {first_key(arguments.keys_file)}"
    if arguments.certificate:
        TLS.load_cert_chain(arguments.certificate / "tls.crt", arguments.certificate / "tls.key")
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
