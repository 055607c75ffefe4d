"""The certificate that HTTP and gRPC show. A renewed one is taken over, for connections that are made from then on."""

from __future__ import annotations

import ssl
from pathlib import Path

from fabric.errors import ConfigError
from fabric.json_files import FileStamp, stamp_of


class Certificate:
    """A PEM file and that of its key, as `context` for HTTP and as `pem`, key and certificate, for gRPC. Raises ConfigError for files of no use."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._stamps: tuple[FileStamp, ...] = ()
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.set_alpn_protocols(["http/1.1"])
        self.pem = (b"", b"")
        self.refresh()

    def refresh(self) -> None:
        """Take over files that were changed. Raises ConfigError, and keeps what it had."""
        certificate, key = self._files
        try:
            # First: what is replaced in between is read again.
            stamps = tuple(stamp_of(path.stat()) for path in self._files)
            if stamps == self._stamps:
                return
            # A certificate whose key is not here yet would take the place of the former one.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
            pem = (key.read_bytes(), certificate.read_bytes())
            self.context.load_cert_chain(certificate, key)
        except OSError as error:  # OpenSSL's are such too
            raise ConfigError(f"cluster.gateway: {certificate} and its key: {error}") from error
        self.pem = pem
        self._stamps = stamps
