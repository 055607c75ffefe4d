"""Rehearsals of the batching discipline: asked as a message, played in a process of their own (ADR 0270)."""
