"""What holds for the whole suite: how hypothesis judges, and how workers share the tests out; no fixtures."""

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# The machine may be busy, and `make test` keeps it so: hypothesis judges what it finds, never how long
# that took. Of its own profile for CI the rest stays.
settings.register_profile(
    "untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")

PODS = ("test_pod.py", "test_pod_secured.py", "test_rolling.py")
"""Their pods have names, of which the machine has one each."""
WHOLE = ("test_eval.py", "test_model.py", "test_remote.py")
"""What these files start for all of their tests is dear."""


class Sharing(LoadScopeScheduling):
    """Hands out single tests, so that no worker is left with a long file; of these, all to one worker.

    xdist's own way to say so, a mark, does nothing under pytest 9.2 (xdist 3.8 writes to `_nodeid`).
    """

    def _split_scope(self, nodeid):
        path = nodeid.partition("::")[0]
        name = path.rpartition("/")[2]
        if name in PODS:
            return "pods"
        return path if name in WHOLE or path.startswith("tests/unit/") else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    config.option.loadscopereorder = False  # the slow ones are collected first, and stay first
    return Sharing(config, log)
