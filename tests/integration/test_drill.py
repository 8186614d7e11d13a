"""`pointsman drill` as a user runs it: the breaker proves itself, and a broken one is found out."""

import asyncio
import contextlib
import json
import signal
import sys

import pytest
from gateway import ROUTES, free_ports, gateway, scenario, until

from extproc.cli import main

pytestmark = pytest.mark.envoy

NEVER_OPENS = (
    '[circuit_breaker]\nfailure_threshold = 1000\ncooldown = "2s"\n[retry]\nmax_retries = 0\n'
)
AS_IT_SHOULD = NEVER_OPENS.replace("1000", "5")


@contextlib.asynccontextmanager
async def drilling(*arguments):
    """The command as a process that does not outlive the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "extproc.cli", "drill", *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.communicate()


async def drilled(*arguments):
    async with drilling(*arguments) as process:
        out, err = await process.communicate()
        return process.returncode, out.decode(), err.decode()


@scenario
async def test_every_expectation_holds_on_a_gateway_of_its_own():
    # Two at once: most of their time is waiting.
    results = await asyncio.gather(
        drilled("--json", "--rps", 20, "--fault", "hang", "flaky"),
        drilled("--json", "--rps", 20, "--fault", "5xx", "refused"),
    )
    reasons = {"hang": "timeout", "flaky": "5xx", "5xx": "5xx", "refused": "connect_error"}
    seen = {}
    for code, out, err in results:
        document = json.loads(out)
        drills = document["drills"]
        not_held = [e for d in drills for e in d["expectations"] if e["verdict"] != "held"]
        assert (code, document["held"], not_held) == (0, True, []), err
        seen |= {drill["fault"]: drill for drill in drills}
    assert seen.keys() == reasons.keys()
    for fault, drill in seen.items():
        values = {each["name"]: each.get("values") for each in drill["expectations"]}
        fallbacks = values["each fallback was counted once, under the right reason"]
        assert fallbacks["told_to_clients"].keys() == {reasons[fault], "circuit_open"}
        assert any("CLOSED" in row["what"] for row in drill["timeline"])


@scenario
async def test_on_a_running_gateway_that_never_opens():
    async with gateway(NEVER_OPENS + ROUTES) as gw:
        claimed = gw.directory / "claimed.toml"
        text = gw.config_path.read_text(encoding="utf-8")
        claimed.write_text(text.replace(NEVER_OPENS, AS_IT_SHOULD), encoding="utf-8")
        url = f"http://127.0.0.1:{gw.listen}"
        arguments = ("--url", url, "--upstream", "primary", "--config", claimed)

        # Somebody else's fault is left alone.
        await gw.fault("primary", "5xx")
        code, _, err = await drilled(*arguments)
        assert code == 1
        assert "primary is broken already (5xx); mend it first" in err
        assert gw.upstreams["primary"].fault.kind == "5xx"
        await gw.fault("primary", None)

        # An interrupted drill mends what it broke.
        for number in (signal.SIGINT, signal.SIGTERM):
            async with drilling(*arguments) as process:
                await until(lambda: gw.upstreams["primary"].fault, within_s=20)
                process.send_signal(number)
                await process.communicate()
                assert process.returncode == 130
            assert gw.upstreams["primary"].fault is None

        # And the gateway is found out: the expectation has a name, the rest is judged all the same.
        code, out, err = await drilled(*arguments)
        assert code == 1, err
        lines = out.splitlines()
        assert any(line.startswith("NOT HELD        the circuit opened") for line in lines), out
        assert any(line.startswith("held            every request was answered") for line in lines)
        assert "expectations NOT HELD" in lines[-2]
        assert gw.upstreams["primary"].fault is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fault", "hangs"], "there is no fault 'hangs'"),
        (["--url", "http://127.0.0.1:8080"], "--upstream ID"),
        (["--url", "http://192.0.2.1:8080", "--upstream", "coder"], "not on this machine"),
        (["--url", "http://127.0.0.1:8080", "--upstream", "nobody"], "no upstream 'nobody'"),
        (["--url", "http://127.0.0.1:8080", "--upstream", "coder", "--article"], "--article"),
        (["--upstream", "coder"], "--url"),
        (["--rps", "0"], "--rps"),
    ],
)
def test_a_drill_that_makes_no_sense_ends_with_2(arguments, message, capsys):
    assert main(["drill", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_upstream_that_is_no_demo_upstream_is_never_touched(tmp_path, capsys):
    (port,) = free_ports(1)
    config = tmp_path / "real.toml"
    for base_url in (f"http://127.0.0.1:{port}", "http://192.0.2.1:80"):
        config.write_text(f'[upstream.real]\nbase_url = "{base_url}"\nmodel = "m"\n')
        arguments = ["--url", "http://127.0.0.1:1", "--upstream", "real", "--config", str(config)]
        assert main(["drill", *arguments]) == 1
        assert "is no demo upstream of this machine" in capsys.readouterr().err
