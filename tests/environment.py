"""What the environment of every process has that a test starts, also where it is made from nothing."""

from __future__ import annotations

from typing import Final

from roles.runtime.idle_import import ALWAYS, AT_ONCE_VARIABLE

# The suite keeps all cores busy, and whoever starts gently there waits and starts twice. `test_idle_import.py` starts gently.
AT_ONCE: Final = {AT_ONCE_VARIABLE: ALWAYS}
