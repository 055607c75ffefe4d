"""The documentation. What is generated of it, and the site, are made by `docs/generate`."""
