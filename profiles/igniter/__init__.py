"""iGniter's coefficients of a model: what they are, how they are fitted, how a profile keeps them."""
