"""Memory and time of a run on paper; plain Python, knows no framework."""
