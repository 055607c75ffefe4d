"""What to do, purely: batching, placement, scaling. No sockets, clocks, threads or randomness of its own."""
