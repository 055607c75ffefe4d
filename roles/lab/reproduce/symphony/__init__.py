"""Symphony's experiments (Chen et al., arXiv 2308.07470v2), played by the scheduler alone on virtual time."""
