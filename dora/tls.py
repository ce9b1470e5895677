"""TLS for HTTP between hosts: files with a certificate, its key, and the authority that signed those of the others."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dora.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files; the certificate names the host or the address at which this process is reached."""

    certificate: Path
    key: Path
    authority: Path

    @classmethod
    def of(cls, folder: Path | None) -> Self | None:
        """Return certificate.pem, key.pem and authority.pem of a folder."""
        return cls(*(folder / f"{name}.pem" for name in ("certificate", "key", "authority"))) if folder else None

    def to_listen(self) -> ssl.SSLContext:
        """Return how this process shows that it is the one that the certificate names."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        with _clear_errors(self.certificate, self.key):
            context.load_cert_chain(self.certificate, self.key, password="")
        return context

    def to_connect(self) -> ssl.SSLContext:
        """Return how this process verifies others: by this authority alone, and by the name in the address."""
        with _clear_errors(self.authority):
            return ssl.create_default_context(cafile=self.authority)


@contextmanager
def _clear_errors(*paths: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as err:
        raise ConfigError(f"{' and '.join(map(str, paths))}: cannot be used for TLS: {err}") from err
