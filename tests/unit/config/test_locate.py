"""Every value of a legal TOML text has the line on which it stands."""

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.locate import locate

# Each value says its own line, so that tomllib's result holds the expectation: as a number, after
# the @ of a string, as the minute of a time.
LEGAL = r"""
first = 2
[ table ]  # = [ "
key = 4
"quoted.key # = " = 5
'literal"key' = 6
dotted . "in two" . parts = 7
"\u00e9\"\\" = 8
"" = 9
[ table . "sub.table" ]
basic = "# [x] \" = \\@11"
literal = '# [x] " \@12'
multi = TQ
""\"
"" [no.header]
key = 9 \
  # ""@13TQ
quotes = TQ""@18TQ
multi_literal = '''
'' [no] "
# @19''' # not a comment in there, but here a comment
date = 1979-05-27T07:22:32Z
local = 1979-05-27 07:23:32 # a space in a date
time = 07:24:00
array = [ 25, [25, 25], [ # ]
  26, # ], "
  "a # ] @27", [
    28 , TQ
@28TQ
  ], { x = 30, y.z = 30, "q r" = [30, {w = 30}], s = ']}@30' },
]]
[table.after]
inline = { } # nothing
empty = []
key = 35
[[tables]]
key = 37
[tables.sub]
key = 39
[[tables]]
[[tables.inner]]
key = 42
[[tables.inner]]
key = 44
sub.key = 45
[tables.sub]
key = 47
[[deep.tables]]
key = 49
[late.child]
key = 51
[late]
key = 53
last = 54 # and no line break at the end""".replace("TQ", '"""')


def leaves(value, path=()):
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))
    else:
        yield path, value


def own_line(value):
    if isinstance(value, int):
        return value
    return int(value.rpartition("@")[2]) if isinstance(value, str) else value.minute


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_every_value_of_a_hard_text_is_on_its_line(newline):
    text = LEGAL.replace("\n", newline)
    lines = locate(text)
    values = list(leaves(tomllib.loads(text)))
    assert len(values) == 38
    assert [(path, lines.of(path)) for path, _ in values] == [
        (path, own_line(value)) for path, value in values
    ]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("table",), 3),
        (("table", "sub.table"), 10),
        (("table", "after"), 32),
        (("tables",), 36),
        (("tables", 0), 36),
        (("tables", 1), 40),
        (("tables", 1, "inner", 1), 43),
        (("tables", 1, "inner", 1, "missing"), 43),
        (("table", "missing", "below"), 3),
        (("late",), 52),
        (("nowhere",), 1),
        ((), 1),
    ],
)
def test_tables_and_what_is_missing_in_them(path, line):
    assert locate(LEGAL).of(path) == line


def test_text_that_is_not_legal_ends_the_search_and_nothing_else():
    lines = locate("a = 1\nb = = [\nc = 3\n")
    assert lines.of(("a",)) == 1
    for text in ("[", "a", "a =", 'a = "', "a = [1,", "a = {b = ", "[[x", "]", "\x00"):
        locate(text)


KEYS = st.text(st.characters(codec="utf-8"), max_size=6)
LEAVES = st.one_of(
    st.integers(-9, 9), st.booleans(), st.text(st.characters(codec="utf-8"), max_size=8)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)
GAPS = st.sampled_from(["", " ", "\n", " # ] = \" '\n", "\n\n\t"])


class Writer:
    """Writes a value as TOML, with blanks and comments where they may be, and notes the lines."""

    def __init__(self, draw):
        self.draw = draw
        self.text = ""
        self.lines = {}

    def line(self):
        return self.text.count("\n") + 1

    def table(self, table, path):
        nested = {key: value for key, value in table.items() if isinstance(value, dict) and value}
        for key, value in table.items():
            if key not in nested:
                self.pair(key, value, path)
                self.text += self.draw(GAPS) + "\n"
        for key, value in nested.items():
            inner = (*path, key)
            self.lines[inner] = self.line()
            self.text += "[" + ".".join(map(self.quote, inner)) + " ]" + self.draw(GAPS) + "\n"
            self.table(value, inner)

    def pair(self, key, value, path):
        self.lines[*path, key] = self.line()
        self.text += self.quote(key) + "= "
        self.value(value, (*path, key))

    def value(self, value, path):
        if isinstance(value, list):
            self.text += "[" + self.draw(GAPS)
            for index, item in enumerate(value):
                self.lines[*path, index] = self.line()
                self.value(item, (*path, index))
                self.text += self.draw(GAPS) + "," + self.draw(GAPS)
            self.text += "]"
        elif isinstance(value, dict):
            self.text += "{ "
            for number, (key, item) in enumerate(value.items()):
                self.text += ", " if number else ""
                self.pair(key, item, path)
            self.text += " }"
        elif isinstance(value, str) and self.draw(st.booleans()):
            # A multi-line string may hold line breaks and up to two quotes as they are.
            body = self.quote(value)[1:-1].replace("\\n", "\n").replace('\\"', '"', 1)
            self.text += f'"""\n{body}"""'
        else:
            self.text += self.quote(value)

    @staticmethod
    def quote(value):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@given(st.data())
def test_every_path_of_any_document_is_on_its_line(data):
    writer = Writer(data.draw)
    document = data.draw(st.dictionaries(KEYS, VALUES, max_size=4))
    writer.table(document, ())
    assert tomllib.loads(writer.text) == document
    lines = locate(writer.text)
    assert {path: lines.of(path) for path in writer.lines} == writer.lines
