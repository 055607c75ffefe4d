"""Which model on which slice of which GPU: placement policies behind one interface. `registry.py` knows them all."""
