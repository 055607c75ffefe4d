"""Writes the pages that have changed, and names them."""

from __future__ import annotations

import sys

from docs.generate import generated

for path, text in generated().items():
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{path}\n")
