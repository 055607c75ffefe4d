"""A cluster on several hosts, set up and kept through the system's own ssh: `tenuto deploy`."""
