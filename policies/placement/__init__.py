"""Which model on which slice of which GPU: placement policies behind one interface."""
