"""One file for each batching discipline; `policies/batching/registry.py` has their names and options."""
