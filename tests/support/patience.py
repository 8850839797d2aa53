"""How long a test may take: the only time limit of the tests.

The limit is a guard against hanging. No test waits for a moment, and nothing that a test waits for has a limit of its
own. When the guard ends a test, the traceback shows the line that waited, and `pipeline.running` adds the last lines of
each process under way.
"""

PATIENCE = 3000
"""Seconds per test, fixtures included. The longest test, the quickstart, takes 250 s in `.ci/run` on two cores without
instructions for bf16; this is twelve times as long."""
