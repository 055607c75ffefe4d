"""A real cluster of processes, a real load, and a seed that decides what goes wrong and when."""
