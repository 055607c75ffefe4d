"""How roles are started as children: ``python -m roles.cli COMMAND …``."""

from roles.cli import main

main()
