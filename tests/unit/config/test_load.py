"""What good files become, and what is wrong with files that no fixture can be."""

import dataclasses
import pickle
from pathlib import Path

import pytest

from extproc.config import (
    Address,
    Chain,
    Config,
    ConfigError,
    ExtprocTls,
    Fallback,
    FallbackMode,
    Fault,
    Foreign,
    Route,
    Router,
    Server,
    UnknownModel,
    Upstream,
    load,
    parse,
)
from extproc.core.circuit import CircuitPolicy
from extproc.core.errors import Content, FallbackReason

DATA = Path(__file__).parents[2] / "data" / "config"
ENVIRON = {"PRIMARY_API_KEY": "p", "FALLBACK_API_KEY": "f"}
UPSTREAM = '[upstream.x]\nbase_url = "http://x.example"\nmodel = "m"\n'
PAIR = UPSTREAM + '[upstream.y]\nbase_url = "http://y.example"\nmodel = "n"\n'


def good(text, environ=None):
    return parse(text, file="c.toml", environ={} if environ is None else environ)


def faults(text, environ=None):
    with pytest.raises(ConfigError) as caught:
        good(text, environ)
    return [str(fault) for fault in caught.value.faults]


def test_article_config_loads_as_it_stands():
    assert load(DATA / "article.toml", environ=ENVIRON) == Config(
        upstreams={
            "primary": Upstream(
                id="primary",
                name="vllm-primary",
                base_url="https://llm.example/api",
                model="your-primary-model",
                api_key_env="PRIMARY_API_KEY",
                inference_timeout_s=5,
                connect_timeout_s=2,
            ),
            "fallback": Upstream(
                id="fallback",
                name="vllm-fallback",
                base_url="https://llm.example/api",
                model="your-fallback-model",
                api_key_env="FALLBACK_API_KEY",
                inference_timeout_s=8,
            ),
        },
        routes=(Route("default", ("primary", "fallback")),),
        router=Router(default="default"),
        server=Server(Address("0.0.0.0", 8080), read_timeout_s=10, write_timeout_s=30),
        circuit=CircuitPolicy(
            failure_threshold=5,
            window_s=30,
            cooldown_s=30,
            half_open_max_requests=3,
            counted_errors=frozenset(
                {
                    FallbackReason.TIMEOUT,
                    FallbackReason.SERVER_ERROR,
                    FallbackReason.CONNECT_ERROR,
                }
            ),
        ),
        fallback=Fallback(
            FallbackMode.MODEL_THEN_RULE,
            "The service is busy. Please shorten your input and try again.",
            "model_fallback_total",
        ),
    )


def test_article_upstreams_are_tried_in_the_order_of_the_file():
    chains = load(DATA / "article.toml", environ=ENVIRON).chains()
    assert chains[0] == Chain("route.default", ("primary", "fallback"), rule=True)


def test_without_an_environment_keys_need_not_be_set():
    assert load(DATA / "article.toml", environ=None).upstreams["primary"].api_key_env


def test_values_of_every_kind():
    config = good(
        PAIR
        + """max_concurrent_requests = 7
connect_timeout = "1.5s"
[server]
listen = ":80"
request_timeout = "1h"
max_body = "1.5MiB"
[admin]
listen = "localhost:9901"
[metrics]
listen = "[0:0::1]:9464"
[extproc]
socket = "./x.sock"
[router]
default = "code"
workers = 3
queue = 9
deadline = "200ms"
aliases = ["自动"]
unknown_model = "default"
encoder.path = "m.onnx"
[fallback]
mode = "none"
[retry]
max_retries = 0
base = "3ms"
max = "3ms"
[[route]]
name = "code"
upstreams = ["y", "x"]
threshold = 1
utterances = ["写代码"]
keywords = ["segfault"]
patterns = ['\\d+']
headers = { "X-Team" = "data", "x-tier" = "*" }
has = ["tools", "images"]
min_chars = 1
max_chars = 1
priority = 1000
"""
    )
    assert config.server == Server(
        Address("0.0.0.0", 80), request_timeout_s=3600, max_body_bytes=3 * 2**19
    )
    assert config.admin == Address("127.0.0.1", 9901)
    assert config.metrics == Address("::1", 9464)
    assert str(config.metrics) == "[::1]:9464"
    assert config.extproc_socket == "./x.sock"
    assert config.upstreams["y"].connect_timeout_s == 1.5
    assert config.upstreams["y"].max_concurrent_requests == 7
    assert config.upstreams["y"].name == "y"
    assert config.router.unknown_model is UnknownModel.DEFAULT
    assert config.router.encoder.path == "m.onnx"
    assert config.router.aliases == ("自动",)
    assert config.router.deadline_s == 0.2
    assert config.retry.base_s == config.retry.max_s == 0.003
    assert config.fallback.mode is FallbackMode.NONE
    assert config.routes == (
        Route(
            "code",
            ("y", "x"),
            1.0,
            ("写代码",),
            ("segfault",),
            patterns=(r"\d+",),
            headers=(("x-team", "data"), ("x-tier", "*")),
            has=(Content.TOOLS, Content.IMAGES),
            min_chars=1,
            max_chars=1,
            priority=1000,
        ),
    )


@pytest.mark.parametrize(
    ("url", "host", "port", "tls", "path"),
    [
        ("https://llm.example", "llm.example", 443, True, ""),
        ("http://llm.example:8000/api/v1/", "llm.example", 8000, False, "/api/v1"),
        ("HTTP://127.0.0.1/a%20b", "127.0.0.1", 80, False, "/a%20b"),
        ("https://[::1]:8443/", "::1", 8443, True, ""),
        ("http://my_service.ns.svc.", "my_service.ns.svc.", 80, False, ""),
    ],
)
def test_base_url(url, host, port, tls, path):
    upstream = good(UPSTREAM.replace("http://x.example", url)).upstreams["x"]
    assert (upstream.host, upstream.port, upstream.tls, upstream.path) == (host, port, tls, path)


@pytest.mark.parametrize("name", ["gpt-4o", "org/Model-7B:free", "@cf/x", "claude@2024", "a,b=c"])
def test_model_names_of_real_providers(name):
    assert good(UPSTREAM.replace('"m"', f'"{name}"')).upstreams["x"].model == name


def test_one_port_on_two_addresses_is_no_clash():
    good(
        '[admin]\nlisten = "127.0.0.1:9000"\n[metrics]\nlisten = "127.0.0.2:9000"\n'
        f'[server]\nlisten = "[::1]:9000"\n{UPSTREAM}'
    )


def test_listener_that_could_not_be_read_clashes_with_nobody():
    text = f'[server]\nlisten = ":9901"\n[admin]\nlisten = "nowhere"\n{UPSTREAM}'
    assert len(faults(text)) == 1


def test_route_called_default_is_the_default():
    route = '[[route]]\nname = "{}"\nupstreams = ["x"]\n'
    config = good(UPSTREAM + route.format("code") + route.format("default"))
    assert config.router.default == "default"


def test_route_whose_name_was_refused_may_be_the_default():
    text = (
        f'[router]\ndefault = "my chat"\n{UPSTREAM}[[route]]\nname = "my chat"\nupstreams = ["x"]'
    )
    assert [fault.split(": ")[1] for fault in faults(text)] == ["route[0].name"]


def test_missing_default_route_is_named_in_the_router_table_if_there_is_one():
    text = f'{UPSTREAM}[[route]]\nname = "code"\nupstreams = ["x"]\n\n[router]\nqueue = 3\n'
    assert faults(text)[0].startswith("c.toml:8: router.default: is missing")


def test_key_of_another_table_is_sent_there():
    assert faults(f"{UPSTREAM}[router]\nthreshold = 0.3\nqueu = 3\n") == [
        "c.toml:5: router.threshold: unknown key; move it to [[route]]",
        'c.toml:6: router.queu: unknown key; did you mean "queue"?',
    ]


@pytest.mark.parametrize(
    ("secret", "said"),
    [
        ("", "is empty"),
        (" \n", "is blank"),
        ("two words", "holds spaces"),
        ("hunter2\n", "holds spaces"),
        ("hunter2\x7f", "holds spaces, line breaks, control characters"),
    ],
)
def test_key_that_cannot_be_sent(secret, said):
    (fault,) = faults(UPSTREAM + 'api_key_env = "KEY"\n', {"KEY": secret})
    assert fault.startswith(
        f"c.toml:4: upstream.x.api_key_env: the environment variable KEY {said}"
    )
    assert "hunter2" not in fault


MANY = """
[server]
listen = ":8080"
[server.auth]
keys_file = "/k"
[metrics]
listen = ":9464"
[upstream.x]
name = "big"
base_url = "https://x.example"
model = "m"
api_key_env = "SET"
ca_file = "/ca"
[upstream.y]
base_url = "http://y.example"
model = "n"
[circuit_breaker]
counted_errors = ["5xx"]
[retry]
max = "1s"
[router]
default = "chat"
aliases = ["auto"]
deadline = "150ms"
[router.encoder]
url = "http://e.example/v1/embeddings"
deadline = "60ms"
[[route]]
name = "code"
upstreams = ["x", "y"]
utterances = ["a", "b"]
headers = { x-team = "c" }
max_chars = 9
[[route]]
name = "chat"
upstreams = ["y"]
"""
SINGLE = [
    ('":8080"', '":9464"'),
    ('keys_file = "/k"\n', ""),
    ("[metrics]", "[metrics]\nliten = 1"),
    ('"big"', '"y"'),
    ('"https://x.example"', '"https://"'),
    ('"SET"', '"UNSET"'),
    ('"http://y.example"', '"http://y.example"\nca_file = "/ca"'),
    ('["5xx"]', '["5xx", "6xx"]'),
    ('"1s"', '"1ms"'),
    ('default = "chat"', 'default = "chta"'),
    ('["auto"]', '["auto", "n"]'),
    ('"60ms"', '"160ms"'),
    ("[router.encoder]", '[router.encoder]\npath = "/m"'),
    ('name = "code"', 'name = "co de"'),
    ('["x", "y"]', '["x", "z"]'),
    ('"b"]', '"b", ""]'),
    ('x-team = "c"', 'cookie = "c", x-team = 3'),
    ("max_chars = 9", "max_chars = 9\nmin_chars = 10"),
]


@pytest.mark.parametrize("one", SINGLE, ids=lambda change: change[1])
def test_a_fault_hides_no_other_that_does_not_follow_from_it(one):
    def places(*changes):
        text = MANY
        for old, new in changes:
            assert text.count(old) == 1
            text = text.replace(old, new)
        found = faults(text, {"SET": "k"})
        return {fault.partition(": ")[2].partition("; ")[0] for fault in found}

    assert good(MANY, {"SET": "k"})
    alone = places(one)
    for other in SINGLE:
        if other != one:
            assert alone | places(other) <= places(one, other), other


def test_default_may_be_meant_for_a_route_whose_name_is_unfit_or_missing():
    for name in ('name = "co de"\n', ""):
        text = f'{UPSTREAM}[router]\ndefault = "co de"\n[[route]]\n{name}upstreams = ["x"]\n'
        (fault,) = faults(text + '[[route]]\nname = "chat"\nupstreams = ["x"]\n')
        assert "route[0].name" in fault


def test_integer_too_long_to_print():
    said = "is out of range; write a whole number from 1 to 1000000"
    assert faults(UPSTREAM + f"max_concurrent_requests = 0x{'f' * 9000}\n") == [
        f"c.toml:4: upstream.x.max_concurrent_requests: {said}"
    ]
    assert faults(UPSTREAM + f"max_concurrent_requests = {'9' * 9000}\n") == [
        "c.toml:4: syntax: a number has too many digits; shorten it"
    ]


def test_nesting_too_deep_for_the_parser():
    (fault,) = faults(f"{UPSTREAM}api_key_env = {'[' * 5000}{']' * 5000}\n")
    assert "nested" in fault


def test_fault_is_one_printable_line_whatever_the_file_holds():
    key = r"\u001b[2J\n" + "k" * 500
    (fault,) = faults(f'{UPSTREAM}"{key}" = 1\n')
    assert fault.isprintable()
    assert len(fault) < 300


@pytest.mark.parametrize("key", ["name", "model", "api_key_env"])
def test_long_value_is_cut(key):
    upstream = '[upstream.x]\nbase_url = "http://x.example"\nmodel = "m"\nname = "x"\n'
    text = upstream.replace(f"{key} =", "x =") + f'{key} = "{"M" * 5000} "\n'
    assert max(map(len, faults(text))) < 300


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_line_endings_do_not_move_lines(newline):
    text = f'{UPSTREAM}\n[router]\nencoder.path = """\n\n"""\nqueu = 3\n'.replace("\n", newline)
    assert [int(fault.split(":")[1]) for fault in faults(text)] == [6, 9]


@pytest.mark.parametrize("text", ["", " \n\t\n", "\ufeff"])
def test_empty_file(text):
    assert faults(text) == ["c.toml:1: file: is empty; start from docs/configuration.md"]


def test_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(UPSTREAM, encoding="utf-8-sig")
    assert load(path, environ={}) == good(UPSTREAM)


def _load_faults(path):
    with pytest.raises(ConfigError) as caught:
        load(path, environ={})
    return list(caught.value.faults)


def test_file_that_is_not_utf8(tmp_path):
    path = tmp_path / "c.toml"
    path.write_bytes(UPSTREAM.encode() + "# caf\u00e9\n".encode("latin-1"))
    problem = "is not UTF-8 from this line on"
    assert _load_faults(path) == [Fault(str(path), 4, "file", problem, "save it as UTF-8")]
    path.write_text(UPSTREAM, encoding="utf-16")
    problem = "is UTF-16, not UTF-8"
    assert _load_faults(path) == [Fault(str(path), 1, "file", problem, "save it as UTF-8")]


def test_file_that_cannot_be_read(tmp_path, monkeypatch):
    (fault,) = _load_faults(tmp_path)
    assert (fault.key, fault.problem) == ("file", "is a directory")
    (fault,) = _load_faults(tmp_path / "absent.toml")
    assert fault.problem == "cannot be read: No such file or directory"

    def refuse(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    (fault,) = _load_faults(str(tmp_path / "c.toml"))
    assert fault.problem == "cannot be read: Permission denied"


def test_config_survives_the_way_to_a_worker():
    config = good(PAIR)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.admin = config.metrics


def test_another_envoy_has_listeners_of_its_own():
    config = good(
        """
[extproc]
listen = ":8080"
settle = "0s"
[extproc.tls]
cert_file = "/tls/tls.crt"
key_file = "/tls/tls.key"
[upstream.x]
base_url = "http://x.example"
model = "m"
"""
    )
    tls = ExtprocTls("/tls/tls.crt", "/tls/tls.key")
    assert config.foreign == Foreign(Address("0.0.0.0", 8080), tls, 0.0)
