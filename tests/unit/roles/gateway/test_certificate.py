from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fabric.errors import ConfigError
from roles.gateway.certificate import Certificate


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(
        [*words, "-days", "1", "-subj", "/CN=localhost", "-passout", "pass:secret"],
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
    )
    assert "ENCRYPTED" in key.read_text()
    with pytest.raises(ConfigError, match=r"k\.pem has a passphrase; it must be a key without"):
        Certificate(certificate, key)
