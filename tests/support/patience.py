"""How long a test may take: the only time limit of the tests.

The limit is a guard against hanging. No test waits for a moment, and nothing that a test waits for has a limit of its
own. When the guard ends a test, the traceback shows the line that waited, and `pipeline.running` adds the last lines of
each process under way.
"""

PATIENCE = 3000
"""Seconds per test, fixtures included. The longest test takes 59 s on two idle cores without instructions for bf16, and
five minutes beside ten other processes; this is ten times as long."""
