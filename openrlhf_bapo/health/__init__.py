"""The doctor, which looks for trouble in a run's metrics."""
