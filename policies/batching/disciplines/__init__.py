"""One file for each batching discipline; `policies/batching/__init__.py` has their names and options."""
