"""What the command line knows: flags, checks before a run, plans, evaluation, signals and failures."""
