"""Which process on which machine. Its commands are listed with the others in `roles/cli/group.py`."""
