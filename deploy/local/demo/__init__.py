"""The demo: a trained digit recogniser and real scanned digits."""
