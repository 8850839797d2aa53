"""Shared by all tests: hypothesis without deadlines, since the machine that runs them may be busy."""

from hypothesis import settings

from openrlhf_bapo import register

settings.register_profile("project", deadline=None, max_examples=150)
settings.load_profile("project")
register()
