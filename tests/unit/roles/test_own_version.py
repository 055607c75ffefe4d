"""Roles say which Tenuto they are, also where nobody installed it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PAGE = "from roles.runtime.metrics.common import about_role; print(about_role('worker').labels)"


def test_a_page_of_metrics_from_a_bare_source_tree() -> None:
    root = Path(__file__).parents[3]
    packages = [path for path in sys.path if path.endswith("site-packages")]
    # A finder of distributions that finds none: the tree is installed here, for development.
    bare = f"import sys; sys.path[:0] = {[str(root), *packages]!r}\nimport importlib.metadata as of\nof.MetadataPathFinder.find_distributions = staticmethod(lambda *_, **__: iter(()))\n"
    told = subprocess.run([sys.executable, "-c", bare + PAGE], capture_output=True, text=True, check=False)
    assert (told.stderr, told.stdout.strip()) == ("", "('worker', 'unknown')")
