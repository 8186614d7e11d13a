"""Which drills make sense on which gateway, and what is asked of the fault switch."""

import pytest

from extproc.config import load, parse
from extproc.core.errors import FallbackReason
from extproc.demo import DEMO_CONFIG
from extproc.demo.faults import FaultKind, parse_fault
from extproc.drill.plan import DrillFault, PlanError, parse_faults, plan

ONE = '[upstream.x]\nbase_url = "http://127.0.0.1:1"\nmodel = "m"\n'


def demo(fault, upstream="coder", rps=10.0):
    return plan(load(DEMO_CONFIG, environ=None), upstream, fault, rps=rps)


@pytest.mark.parametrize("fault", DrillFault)
def test_every_fault_is_one_that_the_demo_switch_knows(fault):
    parsed = parse_fault(demo(fault).switch())
    assert parsed.kind == FaultKind(fault.value)
    assert parsed.for_s > demo(fault).at_most_s  # it ends by itself, but not before the drill


def test_flaky_fails_just_short_of_the_threshold_in_a_row_and_counts_retries(setting_of):
    own = parse_fault(setting_of("flaky").switch())
    assert (own.fail, own.of) == (4, 5)
    retried = parse_fault(demo(DrillFault.FLAKY).switch())
    assert (retried.fail, retried.of) == (4, 5)  # threshold 3, each with one retry


def test_what_opens_is_what_the_policy_counts(setting_of):
    assert setting_of("bad_schema").opens
    assert not demo(DrillFault.BAD_SCHEMA).opens
    assert demo(DrillFault.BAD_SCHEMA).reason is FallbackReason.BAD_SCHEMA
    assert not setting_of("cut_stream").opens
    assert not setting_of("slow_first_token").opens
    limited = setting_of("slow_first_token", first_token='first_token_timeout = "300ms"')
    assert limited.opens
    assert limited.first_token_delay_s > 0.3


def test_auto_is_asked_for_only_where_it_can_mean_nothing_else(setting_of):
    assert setting_of("hang").ask_for == "auto"
    assert demo(DrillFault.HANG).ask_for == "coder"
    assert list(demo(DrillFault.HANG).models) == ["coder", "general"]


def test_faults_are_taken_once_each_in_order():
    assert parse_faults(["5xx", "hang", "5xx"]) == (DrillFault.SERVER_ERROR, DrillFault.HANG)
    assert parse_faults(["all"]) == tuple(DrillFault)
    with pytest.raises(PlanError, match="no fault 'hangs'; there are hang, 5xx"):
        parse_faults(["hangs"])


@pytest.mark.parametrize(
    ("more", "upstream", "rps", "message"),
    [
        ("", "y", 10.0, "no upstream 'y' in the config; it has x"),
        ('[fallback]\nmode = "model_only"\n', "x", 10.0, "nothing stands behind x"),
        ("", "x", 0.1, "too few for 5 failures in 30 s; raise --rps"),
        ("", "x", 0.0, "--rps must be over 0"),
        ("", "x", float("nan"), "--rps must be over 0"),
        ("", "x", 1e6, "at most 200"),
    ],
)
def test_a_drill_that_makes_no_sense_is_refused(more, upstream, rps, message):
    config = parse(ONE + more, file="x.toml", environ=None)
    with pytest.raises(PlanError, match=message):
        plan(config, upstream, DrillFault.HANG, rps=rps)


def test_a_person_is_told_how_long_it_will_take(setting_of):
    assert 8 < setting_of("hang").about_s < 12
    assert setting_of("hang").about_s < setting_of("hang").at_most_s
