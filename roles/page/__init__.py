"""A page for people: what a running cluster does just now, in a browser."""
