"""Where the dashboard listens. Imports no server: every command of `aryl` reads it."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from msgspec import Struct

from common.errors import ConfigError

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8420


class Address(Struct, frozen=True, kw_only=True):
    """Where to listen. port: 0 takes a free one."""

    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    certificate: Path | None = None
    key: Path | None = None

    @property
    def scheme(self) -> str:
        """`https` with a certificate."""
        return "http" if self.certificate is None else "https"

    @property
    def is_loopback(self) -> bool:
        """Whether it is of this machine alone."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @classmethod
    def parsed(cls, text: str) -> Address:
        """An address of HOST:PORT, [HOST]:PORT or PORT.

        Raises:
            ConfigError: it is none of these.
        """
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not port.isdecimal() or int(port) > 65535 or (":" in text and not host):
            raise ConfigError(f"--listen: {text!r}, expected HOST:PORT such as 127.0.0.1:8420")
        return cls(host=host or DEFAULT_HOST, port=int(port))
