"""The parts of the commands: flags, checks before a run, plans, evaluation, signals and failures."""
