"""Nothing in the package makes objects out of bytes: whoever could send those bytes would run code here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("fabric", "roles", "policies", "profiles", "deploy")
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
CALLS = {"eval", "exec"}  # bare; a method of that name is somebody's own
ALLOWED = {
    ("fabric/limits.py", "eval"),  # of our own annotations
    ("roles/config/documents.py", "yaml.load without a safe loader"),  # its own loader is one
}
UNSAFE_YAML = {"load", "load_all", "unsafe_load", "full_load"}


def offences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {one.arg: one.value for one in node.keywords}
            if name in CALLS:
                yield name
            if name == "torch.load" and not (
                isinstance(only := given.get("weights_only"), ast.Constant) and only.value is True
            ):
                yield "torch.load without weights_only=True"
            if name in {"np.load", "numpy.load"} and not (
                "allow_pickle" not in given
                or (isinstance(may := given["allow_pickle"], ast.Constant) and may.value is False)
            ):
                yield f"{name} with allow_pickle"
            if name in {f"yaml.{one}" for one in UNSAFE_YAML} and "SafeLoader" not in ast.unparse(node):
                yield f"{name} without a safe loader"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_bytes_become_objects(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    found = {
        (path.relative_to(ROOT).as_posix(), what) for path in files for what in offences(path.read_text())
    }
    assert found - ALLOWED == set()


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "eval(x)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
    ],
)
def test_the_check_sees(source: str) -> None:
    assert list(offences(source))
