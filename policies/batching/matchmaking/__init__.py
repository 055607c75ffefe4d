"""What `deferred`, `eager`, `timeout` and `tenuto` share: candidates of models matched with pools of slices."""
