"""How the scheduler dispatches batches: what the discipline is told, what it decided, and what was measured of it."""
