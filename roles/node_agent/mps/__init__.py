"""NVIDIA MPS on a node: a daemon for each shared GPU, a guard process for each daemon, and the agent's way to both."""
