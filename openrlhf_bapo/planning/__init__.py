"""Memory and time of a run on paper, in plain Python, without any framework."""
