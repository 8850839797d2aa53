"""What a run's metrics mean: the guide, and the doctor, which looks for trouble in them."""
