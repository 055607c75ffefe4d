"""ModelProfile: what a batch of a model takes on one type of GPU."""
