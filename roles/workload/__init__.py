"""When requests arrive, and what became of them."""
