"""iGniter's placement (IEEE TPDS 34(3), 2023), and those of its rivals that its paper evaluates with it."""
