"""What `fixed`, `nexus`, `clockwork` and `shepherd` share: models, slices, waiting requests and timers."""
