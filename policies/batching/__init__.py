"""When to run which requests where: batching disciplines behind one interface (`base.py`), by name (`registry.py`)."""
