"""A discipline that tries the alternatives on the arrivals it has just had (ADR 0270)."""
