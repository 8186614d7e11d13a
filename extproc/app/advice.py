"""What a valid configuration still leaves to be done; it changes nothing and reads no file."""

from __future__ import annotations

from extproc.config import Config, Encoder


def on_thresholds(config: Config) -> str | None:
    """With another encoder than the default one, on which the built-in thresholds were measured."""
    if config.router.encoder == Encoder():
        return None
    without = [
        route.name for route in config.routes if route.utterances and route.threshold is None
    ]
    if not without:
        return None
    return (
        "note: scores differ by model, and the built-in thresholds were measured with the default one; "
        f"with your [router.encoder], those of {', '.join(without)} are an estimate from the utterances: "
        "calibrate them with pointsman eval DATA --write-thresholds"
    )
