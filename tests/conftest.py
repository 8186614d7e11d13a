"""For every test: no property is judged by how long one of its examples took."""

from hypothesis import settings

# The machine may be busy; speed is measured in bench/, and never gates a test.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
