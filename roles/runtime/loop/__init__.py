"""The event loop of a role's process: the driver, and what it takes events from."""
