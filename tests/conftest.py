"""Shared by all tests: hypothesis without deadlines, since the machine that runs them may be busy."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # reference.py and strategies.py

settings.register_profile("project", deadline=None, max_examples=150)
settings.load_profile("project")

from openrlhf_bapo import register  # noqa: E402

register()
