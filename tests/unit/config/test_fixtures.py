"""One bad file per rule: each opens with the faults it must give, a `#! LINE: KEY: ...` line for each."""

from pathlib import Path

import pytest

from extproc.config import ConfigError, load

DATA = Path(__file__).parents[2] / "data" / "config"
ENVIRON = {"PRIMARY_API_KEY": "p", "FALLBACK_API_KEY": "f"}
BAD = sorted(path for path in DATA.glob("*.toml") if path.read_text().startswith("#! "))


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_bad_file_gives_exactly_its_faults(path):
    expected = [
        line.removeprefix("#! ") for line in path.read_text().splitlines() if line.startswith("#! ")
    ]
    with pytest.raises(ConfigError) as caught:
        load(path, environ=ENVIRON)
    assert [str(fault).removeprefix(f"{path}:") for fault in caught.value.faults] == expected
    assert str(caught.value) == "\n".join(f"{path}:{line}" for line in expected)


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_a_secret_in_the_wrong_place_is_not_repeated(path):
    with pytest.raises(ConfigError) as caught:
        load(path, environ=ENVIRON)
    assert "hunter2" not in str(caught.value)


def test_only_the_article_is_a_good_file():
    assert {path.name for path in DATA.glob("*.toml")} - {path.name for path in BAD} == {
        "article.toml"
    }
