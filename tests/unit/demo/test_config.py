"""The embedded demo config."""

import sys

from extproc.config.load import load
from extproc.config.model import Upstream
from extproc.demo import DEMO_CONFIG, demo_argv
from extproc.demo.__main__ import Listen, parse_arguments


def config():
    return load(DEMO_CONFIG, environ={})


def test_demo_config_is_valid_needs_no_keys_and_stays_on_this_machine():
    demo = config()
    assert {up.host for up in demo.upstreams.values()} == {"127.0.0.1"}
    assert demo.server.listen.host == "127.0.0.1"
    assert not any(up.api_key_env for up in demo.upstreams.values())
    assert all(up.inference_timeout_s <= 2 for up in demo.upstreams.values())


def test_every_route_has_a_fallback_and_utterances_in_both_languages():
    for route in config().routes:
        chinese = [text for text in route.utterances if any("一" <= c <= "鿿" for c in text)]
        assert len(route.upstreams) >= 2
        assert len(route.utterances) >= 12
        assert 5 <= len(chinese) <= len(route.utterances) - 5


def test_demo_command_serves_each_upstream_where_the_config_expects_it():
    demo = config()
    python, flag, module, *arguments = demo_argv(demo.upstreams.values())
    assert (python, flag, module) == (sys.executable, "-m", "extproc.demo")
    listens = parse_arguments(arguments).listen
    assert listens == [Listen(up.host, up.port, id_) for id_, up in demo.upstreams.items()]


def test_demo_command_puts_ipv6_in_brackets():
    upstream = Upstream(id="a", name="a", base_url="http://[::1]:18081/x", model="m")
    assert parse_arguments(list(demo_argv([upstream])[3:])).listen == [Listen("::1", 18081, "a")]
