"""Which samples are trained on, and how old they are: replay, partial rollouts, their files, staleness metrics."""
