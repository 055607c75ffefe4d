from __future__ import annotations

import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deploy.ssh.wheels import OwnWheel, Wheel, needed_wheels, own_wheel, wheels_in
from fabric.errors import ConfigError


def wheel(name: str, *needs: str) -> Wheel:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        lines = "".join(f"Requires-Dist: {one}\n" for one in needs)
        archive.writestr(
            f"{name}-1.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n{lines}"
        )
    return Wheel(f"{name}-1-py3-none-any.whl", len(out.getvalue()), "0" * 64, content=out.getvalue())


OWN = OwnWheel(
    wheel(
        "tenuto",
        "numpy>=1.26",
        "PyYAML",
        "rich>=13",
        'torch<3; extra == "worker"',
        'PuLP<4; extra == "plan"',
        'tenuto[worker,plan]; extra == "all"',
    ),
    "1",
)
HOUSE = [
    wheel("numpy"),
    wheel("PyYAML"),
    wheel("rich", "markdown_it.py>=2", 'ipywidgets; extra == "jupyter"', "Pygments; python_version < '4'"),
    wheel("markdown_it_py", "mdurl"),
    wheel("mdurl"),
    wheel("pygments"),
    wheel("torch", "sympy"),
    wheel("sympy"),
    wheel("pulp"),
    wheel("supervisor"),
    wheel("unrelated"),
]
CORE = {"numpy", "pyyaml", "rich", "markdown-it-py", "mdurl", "pygments"}


@pytest.mark.parametrize(
    ("extras", "beside", "more"),
    [
        ([], [], set()),
        (["worker"], [], {"torch", "sympy"}),
        (["plan"], ["supervisor"], {"pulp", "supervisor"}),
        (["all"], [], {"torch", "sympy", "pulp"}),
    ],
)
def test_a_host_gets_what_its_roles_need_and_what_that_needs(
    extras: list[str], beside: list[str], more: set[str]
) -> None:
    first, *others = needed_wheels(OWN, HOUSE, extras, beside)
    assert first is OWN.wheel
    assert {one.distribution for one in others} == CORE | more


def test_a_wheelhouse_that_lacks_something_says_what_and_how_to_get_it() -> None:
    with pytest.raises(
        ConfigError, match=r"lacks numpy, torch; add them with `pip download -d FOLDER numpy torch`"
    ):
        needed_wheels(
            OWN, [one for one in HOUSE if one.distribution not in {"numpy", "torch"}], ["worker"], []
        )


def test_a_wheelhouse_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        wheels_in(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="there is no wheel in"):
        wheels_in(tmp_path)
    (tmp_path / "y-1-py3-none-any.whl").symlink_to("/proc/self/mem")
    with pytest.raises(ConfigError, match=r"y-1-py3-none-any\.whl: input/output error"):
        wheels_in(tmp_path)
    (tmp_path / "y-1-py3-none-any.whl").unlink()
    (tmp_path / "x-1-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(ConfigError, match="is no wheel"):
        needed_wheels(OwnWheel(wheel("tenuto", "x"), "1"), wheels_in(tmp_path), [], [])


def test_what_runs_here_is_packed_as_a_wheel_that_pip_installs_and_that_is_the_same_each_time(
    tmp_path: Path,
) -> None:
    own = own_wheel()
    assert own.wheel.content == own_wheel().wheel.content
    path = tmp_path / own.wheel.name
    path.write_bytes(own.wheel.content)
    command = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*command, "--target", str(tmp_path / "there"), str(path)], check=True, timeout=100)
    there = tmp_path / "there"
    for name in ("fabric/errors.py", "deploy/ssh/on_host/requests.py", "profiles/data/README.md"):
        assert (there / name).exists() or name.endswith(".md")
    said = subprocess.run(
        [
            sys.executable,
            "-I",
            "-c",
            "import sys; sys.path.insert(0, sys.argv[1]); import roles; print(roles.__file__)",
            str(there),
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.startswith(str(there))
