"""Loaders: a zoo's, or a user's class. `registry.py` knows them all."""
