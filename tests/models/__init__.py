"""User models for integration tests, loaded by workers as `tests.models.…`."""
