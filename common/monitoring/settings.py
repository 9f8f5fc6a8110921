"""The settings of a daemon's metrics page, and the address in them. Pure."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from common.errors import ConfigError

ADDRESS = "metrics.address"
"""The field of a settings file, as errors name it."""


class MetricsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a daemon serves its metrics page, and to whom.

    The default address of a coordinator; an agent has another port, as both may run on one machine.
    """

    address: Annotated[
        str, Meta(description="host:port of the page `/metrics`; empty: it is not served")
    ] = "127.0.0.1:9750"
    bearer_path: Annotated[
        str,
        Meta(
            description="file with a key that a scraper sends as `Authorization: Bearer`; mode "
            "0600; empty: any host that reaches the address may read the page"
        ),
    ] = ""


class AgentMetricsSettings(MetricsSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same for an agent."""

    address: Annotated[
        str, Meta(description="host:port of the page `/metrics`; empty: it is not served")
    ] = "127.0.0.1:9751"


class Address(NamedTuple):
    """Where to listen."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """True if no other machine reaches it."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parsed(address: str) -> Address | None:
    """The parts of an address; None for an empty one.

    Raises:
        ConfigError: it has no host or no port.
    """
    if not address:
        return None
    host, colon, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    is_port = port.isdecimal() and port.isascii() and 1 <= int(port) <= 65535
    is_host = bool(host) and host.isascii() and (":" in host) == is_bracketed
    if not (colon and is_port and is_host) or set(host) & set("/@ []"):
        raise ConfigError(
            f"{ADDRESS}: {address!r}, expected host:port such as 127.0.0.1:9750, or an empty text"
        )
    return Address(host, int(port))


def warning(settings: MetricsSettings) -> str:
    """A page that other machines can read without a key; empty for all else."""
    address = parsed(settings.address)
    if address is None or address.is_loopback or settings.bearer_path:
        return ""
    return (
        f"{ADDRESS}: any host that reaches {address} can read the metrics; set metrics.bearer_path,"
        " or let a firewall admit the scraper alone"
    )
