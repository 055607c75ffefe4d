"""The worker: one process that runs batches on its slices."""
