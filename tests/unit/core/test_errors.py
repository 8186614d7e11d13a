"""The closed sets as clients and dashboards see them."""

from __future__ import annotations

import json

import pytest

from extproc.core import errors
from extproc.core.errors import ErrorKind, error_body

KINDS = [value for value in vars(errors).values() if isinstance(value, ErrorKind)]


def test_codes_are_stable_names_and_unique() -> None:
    codes = [kind.code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    assert all(code.replace("_", "").isalpha() and code.islower() for code in codes)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.code)
def test_error_is_shaped_as_openai_shapes_it(kind: ErrorKind) -> None:
    assert json.loads(error_body(kind)) == {
        "error": {
            "message": kind.message,
            "type": kind.type,
            "param": kind.param,
            "code": kind.code,
        }
    }
    assert kind.type == ("invalid_request_error" if kind.status < 500 else "server_error")
    assert 400 <= kind.status < 600


def test_message_of_any_text_stays_json() -> None:
    body = error_body(errors.MODEL_NOT_FOUND, message='"%s" \\ \n 模')
    assert json.loads(body)["error"]["message"] == '"%s" \\ \n 模'
