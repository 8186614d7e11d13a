"""What certificates and key files must be, and that no fault repeats a key."""

import os
from datetime import UTC, datetime, timedelta

import pytest
from certificates import Authority, Mounted

from extproc.config import ConfigError, Files, Unfit, client_keys, parse

NOW_S = 2_000_000_000.0
KEY = "sk-0123456789abcdef"
UPSTREAM = '[upstream.a]\nbase_url = "https://x.example"\nmodel = "m"\n'


@pytest.fixture
def keys_file(tmp_path):
    def write(text):
        path = tmp_path / "keys"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return write


def test_keys_are_read_with_comments_several_for_a_client_and_crlf(keys_file):
    text = f"\ufeff# who\n\n  team-a\t{KEY}1  \r\nteam-a {KEY}2\nb.c_d {KEY}3"
    found = [(each.client, each.key) for each in client_keys(keys_file(text))]
    assert found == [("team-a", f"{KEY}1"), ("team-a", f"{KEY}2"), ("b.c_d", f"{KEY}3")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file holds no key, so nobody could come in"),
        ("# nobody\n\n", "the file holds no key, so nobody could come in"),
        (KEY, "line 1 of the file has one word"),
        (f"\na Bearer {KEY}", "line 2 of the file has 3 words"),
        (f"a=b {KEY}", "line 1 of the file does not begin with a client's id"),
        (f"a {KEY}\nb {KEY[:15]}", "line 2 of the file has a key of 15 characters"),
        (f"a {KEY}\n#\nb {KEY}", "line 3 of the file has the key of line 1"),
        (f"a {KEY}é", "line 1 of the file has a key with characters that no header can hold"),
        (b"\xff\xfe", "the file is not UTF-8"),
        ("#" * 1024 * 1024 + "\n", "the file is over 1048576 bytes"),
    ],
)
def test_bad_keys_name_the_line_and_never_the_key(keys_file, text, problem):
    with pytest.raises(Unfit) as caught:
        client_keys(keys_file(text))
    assert caught.value.problem == problem
    assert KEY[:15] not in caught.value.problem + caught.value.mend


def test_every_bad_line_of_a_keys_file_is_told_at_once(keys_file):
    text = f"{KEY}\na {KEY}\nb short\nc {KEY}\n"
    faults, _ = look(f'[server.auth]\nkeys_file = "{keys_file(text)}"\n')
    said = [fault.partition("keys_file: ")[2].partition(";")[0] for fault in faults]
    assert said == [
        "line 1 of the file has one word",
        "line 3 of the file has a key of 5 characters",
        "line 4 of the file has the key of line 2",
    ]


def test_a_file_of_another_kind_does_not_fill_the_screen(keys_file):
    faults, _ = look(f'[server.auth]\nkeys_file = "{keys_file("x" + chr(10) * 2 + "y" * 9)}"\n')
    assert len(faults) == 2
    faults, _ = look(f'[server.auth]\nkeys_file = "{keys_file(("x" + chr(10)) * 500)}"\n')
    assert len(faults) == 11
    assert "490 more lines of the file are unfit" in faults[-1]


def test_a_key_is_in_no_repr(keys_file):
    assert KEY not in repr(client_keys(keys_file(f"a {KEY}")))


def look(text, *, now_s=NOW_S, insist=True):
    """Faults and warnings, without what leads to the key."""
    warnings = []
    files = Files(now_s=now_s, warn=lambda fault: warnings.append(str(fault)), insist=insist)
    try:
        parse(UPSTREAM + text, file="x", environ=None, files=files)
    except ConfigError as error:
        return [str(fault) for fault in error.faults], warnings
    return [], warnings


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def mounted(tmp_path, authority):
    return Mounted(tmp_path / "tls", authority.issue())


def tls(mounted, more=""):
    return f'[server.tls]\ncert_file = "{mounted.cert}"\nkey_file = "{mounted.key}"\n{more}'


def now(**ago):
    """A clock that is right, for certificates that end relative to it."""
    return (datetime.now(UTC) - timedelta(**ago)).timestamp()


def test_a_good_pair_is_silent(mounted, authority):
    text = tls(mounted, f'client_ca_file = "{authority.ca_file}"')
    assert look(text, now_s=now()) == ([], [])


def test_an_expired_certificate_is_a_fault(mounted, authority):
    mounted.replace(authority.issue(ends_in=timedelta(days=-1)))
    (fault,), _ = look(tls(mounted), now_s=now())
    assert fault.startswith("x:5: server.tls.cert_file: the certificate expired on ")


def test_a_certificate_not_yet_valid_is_a_fault(mounted):
    (fault,), _ = look(tls(mounted), now_s=now(days=30))
    assert fault.startswith("x:5: server.tls.cert_file: the certificate is not valid before ")


def test_an_end_within_14_days_is_a_warning(mounted, authority):
    mounted.replace(authority.issue(ends_in=timedelta(days=13)))
    faults, (warning,) = look(tls(mounted), now_s=now())
    assert faults == []
    assert warning.startswith("x:5: server.tls.cert_file: the certificate expires on ")
    mounted.replace(authority.issue(ends_in=timedelta(days=15)))
    assert look(tls(mounted), now_s=now()) == ([], [])


def test_the_key_of_another_certificate_is_a_fault(mounted, authority):
    mounted.key.write_bytes(authority.issue().private_key_pem.bytes())
    (fault,), _ = look(tls(mounted), now_s=now())
    assert fault.startswith("x:6: server.tls.key_file: the key is not that of the certificate")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("cert", "x:5: server.tls.cert_file: the file holds no certificate that can be read"),
        ("key", "x:6: server.tls.key_file: the file holds no private key that can be read"),
    ],
)
def test_what_is_no_pem_is_a_fault(mounted, file, said):
    getattr(mounted, file).write_text("hunter2")
    (fault,), _ = look(tls(mounted), now_s=now())
    assert fault.startswith(said)
    assert "hunter2" not in fault


def test_certificate_and_key_are_both_judged_though_neither_is_fit(mounted):
    for each in (mounted.cert, mounted.key):
        each.write_text("hunter2")
    faults, _ = look(tls(mounted), now_s=now())
    assert [fault.split(": ")[1] for fault in faults] == [
        "server.tls.cert_file",
        "server.tls.key_file",
    ]


def test_files_for_another_envoy_are_judged_as_well(mounted, authority):
    text = '[extproc]\nlisten = ":9002"\n' + tls(mounted).replace("server", "extproc")
    assert look(text, now_s=now()) == ([], [])
    mounted.replace(authority.issue(ends_in=timedelta(days=-1)))
    (fault,), _ = look(text, now_s=now())
    assert fault.startswith("x:7: extproc.tls.cert_file: the certificate expired on ")


def test_authorities_must_be_certificates_and_one_of_them_valid(tmp_path, mounted, authority):
    ca = tmp_path / "bad"
    ca.write_text("none")
    (fault,), _ = look(tls(mounted, f'client_ca_file = "{ca}"'), now_s=now())
    assert fault.startswith("x:7: server.tls.client_ca_file: the file holds no certificate")
    late_s = now() + 2e9  # trustme's CAs live long, though not for ever
    (fault,), _ = look(f'ca_file = "{authority.ca_file}"', now_s=max(late_s, 33e9))
    assert fault.startswith("x:4: upstream.a.ca_file: its last CA certificate expired on ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file is empty; put the key into it"),
        (" \n\t\r\n", "the file is blank; put the key into it"),
        ("\x00", "the file holds spaces, line breaks, control characters or non-ASCII"),
        ("hunter2 b", "the file holds spaces, line breaks, control characters or non-ASCII"),
        ("hunter2\nb", "the file holds spaces, line breaks, control characters or non-ASCII"),
        ("hunter2\x1f", "the file holds spaces, line breaks, control characters or non-ASCII"),
        ("hunter2é", "the file holds spaces, line breaks, control characters or non-ASCII"),
    ],
)
def test_an_upstreams_key_file_holds_one_key(keys_file, text, said):
    assert look(f'api_key_file = "{keys_file("sk-1" + chr(10))}"') == ([], [])
    (fault,), _ = look(f'api_key_file = "{keys_file(text)}"')
    assert fault.startswith(f"x:4: upstream.a.api_key_file: {said}")
    assert "hunter2" not in fault


def test_files_that_are_not_there_are_faults_where_they_must_be_and_warnings_elsewhere():
    text = (
        'api_key_file = "/none/k"\nca_file = "/none/ca"\n'
        '[server.tls]\ncert_file = "/none/c"\nkey_file = "/none/k"\n'
        '[server.auth]\nkeys_file = "/none/keys"\n'
    )
    places = [
        "x:4: upstream.a.api_key_file",
        "x:5: upstream.a.ca_file",
        "x:7: server.tls.cert_file",
        "x:8: server.tls.key_file",
        "x:10: server.auth.keys_file",
    ]
    faults, warnings = look(text)
    assert [fault.partition(': "')[0] for fault in faults] == places
    assert warnings == []
    faults, warnings = look(text, insist=False)
    assert faults == []
    assert sorted(each.partition(': "')[0] for each in warnings) == sorted(places)
    assert all("what is in it was not checked" in each for each in warnings)


def test_a_variable_that_is_not_set_is_a_fault_where_it_serves_and_a_warning_elsewhere():
    text = UPSTREAM + (
        'api_key_env = "OWN"\n[router.encoder]\nurl = "http://e.example/v1"\napi_key_env = "ITS"\n'
    )

    def checked(environ, **insist):
        told = []
        files = Files(now_s=NOW_S, warn=lambda fault: told.append(str(fault)), **insist)
        try:
            parse(text, file="x", environ=environ, files=files)
        except ConfigError as error:
            return [str(fault).partition(";")[0] for fault in error.faults], told
        return [], told

    unset = [
        "x:4: upstream.a.api_key_env: the environment variable OWN is not set",
        "x:7: router.encoder.api_key_env: the environment variable ITS is not set",
    ]
    assert checked({}) == (unset, [])
    faults, warnings = checked({}, insist=False)
    assert faults == []
    assert [each.partition(";")[0] for each in warnings] == unset
    assert all("does not start without it" in each for each in warnings)
    # What is set is judged everywhere: a CI job's missing secret is often an empty one.
    (fault,), _ = checked({"OWN": " ", "ITS": "k"}, insist=False)
    assert "the environment variable OWN is blank" in fault


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    """Opening one for reading waits for a writer: the look for new keys would stand still for ever."""
    pipe = tmp_path / "keys"
    os.mkfifo(pipe)
    (fault,), _ = look(f'[server.auth]\nkeys_file = "{pipe}"\n')
    assert fault.endswith("is no regular file; name a file")
    with pytest.raises(Unfit):
        client_keys(str(pipe))


def test_a_file_without_end_is_read_to_a_limit():
    (fault,), _ = look('api_key_file = "/dev/zero"')
    assert fault.endswith("is no regular file; name a file")


def test_a_comment_may_follow_a_key(keys_file):
    found = client_keys(keys_file("a " + "k" * 16 + "   # until all have moved\n"))
    assert [(each.client, each.key) for each in found] == [("a", "k" * 16)]
