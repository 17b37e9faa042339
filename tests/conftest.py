"""For all tests: how long an example takes on a busy machine says nothing about the code."""

from hypothesis import settings

settings.register_profile("etude", deadline=None)
settings.load_profile("etude")
