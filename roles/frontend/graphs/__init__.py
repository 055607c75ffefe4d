"""Applications in a frontend: their requests, the edges between their stages, and users' glue."""
