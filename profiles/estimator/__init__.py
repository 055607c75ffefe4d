"""GK-Estimator: what a model asks of a GPU, from its operator graph and kernel records (Usher section 3.2)."""
