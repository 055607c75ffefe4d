"""The site is built without a warning, from what is there: nothing is fetched."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_is_built_strictly_and_asks_nobody_else(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    start = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Tenuto serves many small and medium DNN models" in start
    assert 'href="tutorial.html"' in start
    fetched = re.findall(r'<(?:link|script|img)[^>]+(?:href|src)="(https?://[^"]+)"', start)
    assert fetched == []
    assert not list(tmp_path.rglob("*.py"))
