"""Writes what of the chart follows from other files: its schema, its README, and the demo's config.

The keys under `config`, their kinds, defaults and meanings come from docs/configuration.md, which a
test holds to the loader. `generate.py --check` writes nothing and fails where a file is not current.
"""  # noqa: INP001  a script beside what it writes

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from extproc.config.load import COUNTABLE
from extproc.config.model import FallbackMode, TlsVersion, UnknownModel
from extproc.core.errors import Content
from extproc.demo import DEMO_CONFIG

CHART: Final = Path(__file__).parent
DOC: Final = CHART.parents[1] / "docs" / "configuration.md"
Schema = dict[str, Any]

# Both of Helm's regular expression engines and Python's read literal characters the same way. YAML
# has no room for the control characters beyond newline and tab, nor for U+FFFE and U+FFFF.
_UNPRINTABLE: Final = "\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufeff\ufffe\uffff"
_TEXT: Final[Schema] = {"type": "string", "pattern": f"^[^{_UNPRINTABLE}]+$"}
_NAME: Final[Schema] = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"}
_PORT: Final = (
    "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
)
_KINDS: Final[dict[str, Schema]] = {
    "address": {"type": "string", "pattern": rf"^[0-9A-Za-z.:\[\]]*:{_PORT}$"},
    "duration": {"type": "string", "pattern": r"^[0-9]{1,15}(\.[0-9]{1,9})?(ms|s|m|h)$"},
    "size": {"type": "string", "pattern": r"^[0-9]{1,15}(\.[0-9]{1,9})?([KMG]i?)?B$"},
    "name": _NAME,
    "route name": _NAME,
    "URL": {"type": "string", "pattern": r"^[hH][tT][tT][pP][sS]?://[!-~]+$"},
    "path": {"type": "string", "pattern": "^/[ -~]{0,99}$"},
    "string": _TEXT,
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "integer": {"type": "integer"},
    "boolean": {"type": "boolean"},
    "array": {"type": "array", "items": _TEXT},
}
_SPECIAL: Final[dict[tuple[str, str], Schema]] = {
    ("[upstream.ID]", "model"): {"type": "string", "pattern": r"^[!#-\[\]-~]+$"},
    ("[upstream.ID]", "api_key_env"): {
        "type": "string",
        "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,99}$",
    },
    ("[server.tls]", "min_version"): {"enum": [str(each) for each in TlsVersion]},
    ("[circuit_breaker]", "counted_errors"): {
        "type": "array",
        "minItems": 1,
        "items": {"enum": [str(each) for each in COUNTABLE]},
    },
    ("[fallback]", "mode"): {"enum": [str(each) for each in FallbackMode]},
    ("[fallback]", "metric_prefix"): {"type": "string", "pattern": "^[A-Za-z_:][A-Za-z0-9_:]*$"},
    ("[router]", "unknown_model"): {"enum": [str(each) for each in UnknownModel]},
    ("[router.encoder]", "path"): _TEXT,
    ("[[route]]", "upstreams"): {"type": "array", "minItems": 1, "items": _NAME},
    ("[[route]]", "headers"): {
        "type": "object",
        "propertyNames": {"pattern": "^[!#-'*+.0-9A-Z^-z|~-]+$"},
        "additionalProperties": {"type": "string", "pattern": "^[!-~]([ -~]*[!-~])?$"},
    },
    ("[[route]]", "has"): {"type": "array", "items": {"enum": [str(each) for each in Content]}},
}
_WITHHELD: Final = {"[extproc]", "[extproc.tls]"}
"""The chart places the socket, or the port."""
_PLACED: Final = {"[server.tls]", "[server.auth]"}
"""The chart's own values give their files, so that none is required here."""
_RANGE: Final = re.compile(r"\b(\d+) to (\d+)\b")


def sections() -> Iterator[tuple[str, list[tuple[str, str, str, str]]]]:
    """Every table of the reference: its label, and key, kind, default and meaning of each row."""
    for section in DOC.read_text(encoding="utf-8").split("\n### ")[1:]:
        label = section.split("`")[1]
        rows = re.findall(
            r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \| (.+) \|$", section, flags=re.MULTILINE
        )
        if label not in _WITHHELD:
            yield label, rows


def config_schema() -> Schema:
    root: Schema = {
        "type": "object",
        "description": "The gateway's own configuration, as YAML: docs/configuration.md. "
        "Empty: the demo with its scripted models.",
        "properties": {},
        "additionalProperties": False,
        # Helm sorts the keys of a map, and without routes the order of upstreams is what is tried.
        "anyOf": [
            {"required": ["upstream", "route"], "properties": {"route": {"minItems": 1}}},
            {"required": ["upstream"], "properties": {"upstream": {"maxProperties": 1}}},
            {"maxProperties": 0},
        ],
    }
    for label, rows in sections():
        table: Schema = {
            "type": "object",
            "properties": {row[0]: _value(label, *row) for row in rows},
            "additionalProperties": False,
        }
        required = [key for key, _, default, _ in rows if default == "required"]
        if required and label not in _PLACED:
            table["required"] = required
        if label == "[upstream.ID]":
            name = {**_NAME, "not": {"const": "rule"}}
            root["properties"]["upstream"] = {
                "type": "object",
                "minProperties": 1,
                "propertyNames": name,
                "additionalProperties": table,
            }
        elif label == "[[route]]":
            root["properties"]["route"] = {"type": "array", "items": table}
        else:
            *parents, last = label.strip("[]").split(".")
            at = root["properties"]
            for parent in parents:
                at = at[parent]["properties"]
            at[last] = table
    return root


def _value(label: str, key: str, kind: str, _default: str, meaning: str) -> Schema:
    schema = dict(_SPECIAL.get((label, key)) or _KINDS[kind])
    if kind == "integer":
        low, high = _RANGE.search(meaning).groups()  # type: ignore[union-attr]  # else it must fail
        schema |= {"minimum": int(low), "maximum": int(high)}
    return schema | {"description": meaning}


def schema() -> Schema:
    chart = yaml.safe_load((CHART / "schema.in.yaml").read_text(encoding="utf-8"))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pointsman",
        "type": "object",
        "definitions": chart["definitions"],
        "properties": {**chart["properties"], "config": config_schema()},
        "additionalProperties": False,
    }


def demo() -> Schema:
    """The demo's file without the listeners, which are a pod's own."""
    config = tomllib.loads(DEMO_CONFIG.read_text(encoding="utf-8"))
    return {
        key: table for key, table in config.items() if key not in ("server", "admin", "metrics")
    }


def readme() -> str:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    full = schema()
    lines = ["| Value | Default | Meaning |", "|---|---|---|"]
    for name in defaults:
        lines += _rows(name, full["properties"][name], defaults[name], full["definitions"])
    head = (CHART / "README.in.md").read_text(encoding="utf-8")
    assert head.count("{{ values }}") == 1
    return head.replace("{{ values }}", "\n".join(lines))


def _rows(name: str, value: Schema, default: object, definitions: Schema) -> Iterator[str]:
    meaning = value.get("description", "")
    named = value
    while ref := named.get("$ref") or named.get("allOf", [{}])[0].get("$ref"):
        named = definitions[ref.rpartition("/")[2]]
    inner = named.get("properties", {})
    is_leaf = name == "config" or not inner or name.endswith("resources")
    if enum := value.get("enum"):
        meaning = f"{meaning} One of {', '.join(f'`{each}`' for each in enum)}."
    shown = f"`{json.dumps(default)}`" if is_leaf else ""
    yield f"| `{name}` | {shown} | {meaning} |"
    if not is_leaf:
        assert isinstance(default, dict)
        assert default.keys() == inner.keys(), name
        for key, each in default.items():
            yield from _rows(f"{name}.{key}", inner[key], each, definitions)


def files() -> dict[Path, str]:
    return {
        CHART / "values.schema.json": json.dumps(schema(), indent=1) + "\n",
        CHART / "files" / "demo.json": json.dumps(demo(), indent=1, ensure_ascii=False) + "\n",
        CHART / "README.md": readme(),
    }


def main() -> int:
    stale = [
        path
        for path, text in files().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if "--check" not in sys.argv:
            path.write_text(files()[path], encoding="utf-8")
        sys.stderr.write(f"{path.relative_to(CHART)}: not current\n")
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
