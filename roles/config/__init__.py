"""The one configuration file: read, checked, and as values."""
