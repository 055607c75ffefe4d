"""What a history ends with in which something that always holds did not."""


class Violated(AssertionError):
    """Says what."""
