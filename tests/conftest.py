"""What holds for the whole suite: hypothesis judges what is found, never how long that took."""

from hypothesis import HealthCheck, settings

# The machine may be busy, and `make test` keeps it so. Of hypothesis' own profile for CI the rest stays.
settings.register_profile(
    "untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")
