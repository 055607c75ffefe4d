"""One active scheduler of several: who it is, and how the next one goes on from where it was (docs/operate/availability.md)."""
