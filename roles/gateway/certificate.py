"""The certificate that HTTP and gRPC show. A renewed one is taken over, for connections that are made from then on."""

from __future__ import annotations

import ssl
from pathlib import Path

from fabric.errors import ConfigError
from fabric.json_files import FileStamp, stamp_of


class Certificate:
    """A PEM file and that of its key, as `context` for HTTP's listener and as `pem`, key and certificate, for gRPC. Raises ConfigError for files of no use."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._stamps: tuple[FileStamp, ...] = ()
        self.pem = (b"", b"")
        self._newest: ssl.SSLContext
        self.refresh()
        self.context = self._newest
        self.context.sni_callback = self._hand_over  # OpenSSL asks it of clients that name no server too

    def refresh(self) -> None:
        """Read both files where one was changed, and show them from the next connection on. Raises ConfigError: what was shown stays."""
        certificate, key = self._files
        try:
            # First: what is replaced in between is read again.
            stamps = tuple(stamp_of(path.stat()) for path in self._files)
            if stamps == self._stamps:
                return
            # Another one each time: a context keeps one certificate of each type of key, and would go on showing the former.
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.set_alpn_protocols(["http/1.1"])
            context.load_cert_chain(certificate, key, password=self._passphrase)  # else the terminal is asked
            pem = (key.read_bytes(), certificate.read_bytes())
        except OSError as error:  # OpenSSL's are such too
            raise ConfigError(f"cluster.gateway: {certificate} and its key: {error}") from error
        self._newest = context
        self.pem = pem
        self._stamps = stamps

    def _passphrase(self) -> bytes:
        raise ConfigError(
            f"cluster.gateway: {self._files[1]} has a passphrase; it must be a key without a passphrase"
        )

    def _hand_over(self, connection: ssl.SSLObject, _name: str | None, _listening: ssl.SSLContext) -> None:
        connection.context = self._newest
