"""Whatever a file holds, it gives a usable Config or a ConfigError, and nothing else."""

import re
import tomllib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.config import Config, ConfigError, parse

DOC = (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
FULL = re.findall(r"```toml\n(.*?)```", DOC, re.DOTALL)[-1]
ENVIRON = {"PRIMARY_API_KEY": "p", "FALLBACK_API_KEY": "f"}
FULL_LINES = FULL.splitlines()

VALUES = r"""
1 -1 0 1.5 nan -inf true 0xffffffffffffffffffff 07:32:00 1979-05-27
"" "x" "rule" "explicit" "default" "primary" "vllm-primary" "coder" "auto" "code" "\u0000" "\U0010FFFF"
"10s" "-1s" "0s" "0.1ms" "1e9h" "999999999999999h" "10MiB" "0B" "2GiB"
":8080" "[::1]:80" "::" "127.0.0.1:9464" "0.0.0.0:9464" "localhost:1" "[::%1]:1" "x:1"
"http://[" "http://[::1]:99999" "http://[::1]:8/x" "http://a:b@c" "//x" "http://1" "http://x/%"
[] [1] [""] ["primary"] ["x",{}] [[]] ["timeout"] {} {x=1} {name="x"} '''x'''
"""


ANY_VALUE = st.sampled_from(VALUES.split())

many = settings(max_examples=300)


def check(text):
    try:
        config = parse(text, file="c.toml", environ=ENVIRON)
    except ConfigError as error:
        faults = error.faults
    else:
        use(config)
        return
    assert faults
    for fault in faults:
        assert 1 <= fault.line <= text.count("\n") + 1
        assert str(fault).isprintable()
        assert fault.key
        assert fault.problem
        assert fault.mend


def use(config):
    assert isinstance(config, Config)
    assert config.route(config.router.default).upstreams
    for chain in config.chains():
        assert chain.upstreams
        for id_ in chain.upstreams:
            upstream = config.upstreams[id_]
            assert upstream.host
            assert 1 <= upstream.port <= 65535
            assert upstream.path == "" or upstream.path.startswith("/")
    listeners = [config.server.listen, config.admin, config.metrics]
    assert len(set(listeners)) == 3
    assert config.server.read_timeout_s >= 0.001


@many
@given(st.text())
def test_any_text(text):
    check(text)


@many
@given(st.text(alphabet=st.sampled_from("[]{}=\"'#.,\n\\ \r\tab1-_:\ufeff\ud800")))
def test_any_text_of_the_characters_of_toml(text):
    check(text)


@many
@given(st.data())
def test_full_example_with_pieces_moved(data):
    text = FULL
    for _ in range(data.draw(st.integers(1, 3))):
        at, end, to = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 3)))
        piece = data.draw(st.sampled_from([text[at:end], text[end:to], "\n", '"', "[", "]", "="]))
        text = text[:at] + piece + text[data.draw(st.sampled_from([at, end, to])) :]
    check(text)


@many
@given(st.data())
def test_full_example_with_other_values_lines_and_tables(data):
    lines = list(FULL_LINES)
    keys = [number for number, line in enumerate(lines) if re.match(r"\w+ = [^\[]", line)]
    for number in data.draw(st.lists(st.sampled_from(keys), max_size=4, unique=True)):
        lines[number] = lines[number].split("=")[0] + "= " + data.draw(ANY_VALUE)
    for _ in range(data.draw(st.integers(0, 3))):
        change = data.draw(st.sampled_from(["drop", "repeat", "insert"]))
        at = data.draw(st.integers(0, len(lines) - 1))
        if change == "drop":
            del lines[at]
        else:
            line = data.draw(st.sampled_from(lines))
            lines.insert(at, line if change == "repeat" else f"new{at} = " + data.draw(ANY_VALUE))
    check("\n".join(lines))


TABLES = st.sampled_from([*tomllib.loads(FULL), "other"])
BELOW = st.sampled_from(
    ["", ".a", ".primary", ".a.b", ".rule", '."a b"', '.""', ".listen", ".name"]
)


@many
@given(
    st.dictionaries(TABLES, ANY_VALUE, max_size=3),
    st.dictionaries(st.tuples(TABLES, BELOW), st.dictionaries(TABLES, ANY_VALUE, max_size=2)),
    st.sampled_from(["[{}]", "[[{}]]"]),
)
def test_tables_of_any_shape(values, tables, header):
    text = "".join(f"{key} = {value}\n" for key, value in values.items())
    for (table, below), pairs in tables.items():
        text += header.format(table + below) + "\n"
        text += "".join(f"{key} = {value}\n" for key, value in pairs.items())
    check(text)
