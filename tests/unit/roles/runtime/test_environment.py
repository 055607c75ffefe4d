from __future__ import annotations

import errno
import fcntl
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from fabric.errors import ConfigError
from roles.cli.options import chosen_run_dir
from roles.runtime.environment import RunDir, goes_at_logout, kept_from_cleaning, require_usable, run_dir
from roles.runtime.run_directory import give_back, take


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """Stands in for the system's directory of temporary files."""
    before = tempfile.tempdir
    tempfile.tempdir = str(tmp_path)
    yield tmp_path
    tempfile.tempdir = before


def test_the_named_directory_comes_first(tmp_path: Path) -> None:
    found = run_dir({"TENUTO_RUN_DIR": str(tmp_path / "deep" / "run"), "XDG_RUNTIME_DIR": str(tmp_path)})
    assert found.path == tmp_path / "deep" / "run"


@pytest.mark.parametrize("variable", ["TENUTO_RUN_DIR", "XDG_RUNTIME_DIR"])
def test_a_directory_goes_with_the_command_that_made_it_if_nothing_came_into_it(
    tmp_path: Path, variable: str
) -> None:
    environment = {variable: str(tmp_path / "run" if variable == "TENUTO_RUN_DIR" else tmp_path)}
    first, second = run_dir(environment), run_dir(environment)
    second.remove()
    assert first.path.is_dir()
    first.remove()
    assert not first.path.exists()
    first = run_dir(environment)
    (first.path / "scheduler-0.plan").touch()
    first.remove()
    assert first.path.is_dir()


def test_the_users_runtime_directory_comes_second(tmp_path: Path) -> None:
    found = run_dir({"XDG_RUNTIME_DIR": str(tmp_path)})
    assert (found.path, found.is_temporary) == (tmp_path / "tenuto", False)
    assert stat.S_IMODE(found.path.stat().st_mode) == 0o700


def test_else_a_private_temporary_directory_goes_with_its_maker(temporary: Path) -> None:
    mine = run_dir({"XDG_RUNTIME_DIR": "/nowhere/at/all"})
    second = run_dir({})
    assert mine.path == second.path
    assert stat.S_IMODE(mine.path.stat().st_mode) == 0o700
    assert (mine.is_temporary, second.is_temporary) == (True, False)
    second.remove()
    assert mine.path.is_dir()
    (mine.path / "socket").touch()
    mine.remove()
    assert not mine.path.exists()


def test_without_any_temporary_directory_it_is_said_what_is_missing_and_what_to_do(temporary: Path) -> None:
    tempfile.tempdir = None
    missing = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    with (
        mock.patch.object(tempfile, "_get_default_tempdir", side_effect=missing),
        pytest.raises(ConfigError, match=r"found in \['/tmp'\]: free space .* with --run-dir$"),
    ):
        run_dir({})


def test_a_temporary_directory_with_somebodys_run_file_stays(temporary: Path) -> None:
    mine = run_dir({})
    (mine.path / "scheduler.json").touch()
    mine.remove()
    assert mine.path.is_dir()


def test_a_temporary_directory_that_others_can_enter_is_refused(temporary: Path) -> None:
    path = run_dir({}).path
    path.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 755; it must be 700"):
        run_dir({})


def test_a_link_in_place_of_the_temporary_directory_is_refused(temporary: Path) -> None:
    path = run_dir({}).path
    path.rename(temporary / "elsewhere")
    path.symlink_to(temporary / "elsewhere")
    with pytest.raises(ConfigError, match="is not a directory"):
        run_dir({})


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    for path in (tmp_path / "f", tmp_path / "f" / "g"):
        with pytest.raises(ConfigError, match="TENUTO_RUN_DIR"):
            run_dir({"TENUTO_RUN_DIR": str(path)})


def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    found = run_dir({"TENUTO_RUN_DIR": str(tmp_path)})
    room = 107 - len(str(found.path)) - 1
    assert found.ipc_address("x" * room) == f"ipc://{found.path}/{'x' * room}"
    with pytest.raises(ConfigError, match="at most 107 bytes, this one 108"):
        found.ipc_address("x" * (room + 1))


@pytest.mark.parametrize("name", ["\udcff", "a\nb", "a\0b"])
def test_a_directory_that_no_address_can_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="printable characters of UTF-8 only"):
        RunDir(Path("/run") / name).ipc_address("x")


def test_a_directory_for_a_role_is_there_and_writable_or_named_with_what_to_do(tmp_path: Path) -> None:
    require_usable(tmp_path)
    with pytest.raises(ConfigError, match=f"{tmp_path}/missing is not there: .*mkdir -p -m 700"):
        require_usable(tmp_path / "missing")
    with (
        mock.patch("os.access", return_value=False),
        pytest.raises(ConfigError, match="not writable for user"),
    ):
        require_usable(tmp_path)  # whoever runs the tests may be root, to whom everything is


def named_by_environment(path: Path) -> object:
    return run_dir({"TENUTO_RUN_DIR": str(path)})


def taken(path: Path) -> None:
    give_back(path, take(path), is_removed=False)


WAYS: list[Callable[[Path], object]] = [named_by_environment, chosen_run_dir, require_usable, taken]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775, 0o770, 0o702])
def test_a_directory_that_others_may_write_in_is_refused_whoever_names_it(
    way: Callable[[Path], object], mode: int, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(
        ConfigError, match=rf"others may write in {path} \(mode {mode:04o}\).*chmod 700 {path}"
    ):
        way(path)
    assert not list(path.iterdir())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o2750])
def test_a_directory_of_ours_is_taken_wherever_it_lies(
    way: Callable[[Path], object], mode: int, tmp_path: Path
) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)  # as /tmp; only the run directory itself is judged
    path = tmp_path / "shared" / "run"
    path.mkdir()
    path.chmod(mode)
    way(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
@pytest.mark.parametrize("way", WAYS)
def test_another_users_directory_is_refused_whoever_names_it(
    way: Callable[[Path], object], tmp_path: Path
) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    os.chown(path, 65_534, 65_534)
    with pytest.raises(ConfigError, match=f"{path} belongs to user 65534; it must belong to user 0"):
        way(path)
    assert not list(path.iterdir())


def test_a_directory_that_is_not_there_yet_may_be_named(tmp_path: Path) -> None:
    assert chosen_run_dir(tmp_path / "run").path == tmp_path / "run"
    taken(tmp_path / "run")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_a_directory_in_use_is_locked_as_who_cleans_directories_of_temporary_files_asks_for(
    tmp_path: Path,
) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    held = kept_from_cleaning(tmp_path), kept_from_cleaning(tmp_path)  # each role does so
    with held[0], held[1], pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with kept_from_cleaning(tmp_path), kept_from_cleaning(tmp_path / "missing"):
        pass  # who starts in the moment of a cleaning is not held up
    os.close(descriptor)


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="this system has no systemd-tmpfiles")
def test_systemd_leaves_what_is_in_use(tmp_path: Path) -> None:
    for name in ("used", "free"):
        (tmp_path / "cleaned" / name).mkdir(parents=True)
        (tmp_path / "cleaned" / name / "up.json").touch()
    rule = tmp_path / "rule.conf"
    rule.write_text(f"d {tmp_path / 'cleaned'} 0700 - - 1us\n")
    with kept_from_cleaning(tmp_path / "cleaned" / "used"):
        subprocess.run(["systemd-tmpfiles", "--clean", str(rule)], check=True, timeout=60)
    left = {path.relative_to(tmp_path / "cleaned") for path in (tmp_path / "cleaned").rglob("*.json")}
    assert left == {Path("used/up.json")}


@pytest.mark.parametrize(
    ("place", "has_systemd", "lingers", "goes"),
    [
        (f"/run/user/{os.getuid()}/tenuto", True, False, True),
        (f"/run/user/{os.getuid()}/tenuto", True, True, False),
        (f"/run/user/{os.getuid()}/tenuto", False, False, False),
        (f"/run/user/{os.getuid()}0/tenuto", True, False, False),
        ("/tmp/tenuto", True, False, False),
    ],
)
def test_who_does_not_linger_loses_what_is_in_the_runtime_directory(
    tmp_path: Path, place: str, *, has_systemd: bool, lingers: bool, goes: bool
) -> None:
    if has_systemd:
        (tmp_path / "run/systemd/system").mkdir(parents=True)
    if lingers:
        (tmp_path / "var/lib/systemd/linger").mkdir(parents=True)
        (tmp_path / "var/lib/systemd/linger" / pwd.getpwuid(os.getuid()).pw_name).touch()
    assert goes_at_logout(Path(place), tmp_path) == goes


def test_a_directory_whose_name_is_too_long_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match="cannot be looked at: File name too long"):
        chosen_run_dir(Path("/tmp") / ("x" * 300))
