"""The rules around an MQTT connection: URLs, plain text, and the proof of a client's identity.

`common.mqttbus` applies these rules to the client library.
"""

from __future__ import annotations

import importlib.util
import ssl
from urllib.parse import unquote

from msgspec import Struct

from common import natsrules
from common.errors import ConfigError
from common.model import NatsAccess

PLAIN_PORT, TLS_PORT = 1883, 8883


class MqttServer(Struct, frozen=True, kw_only=True):
    """One server of a `mqtt_url`."""

    host: str
    port: int
    user: str | None
    password: str | None
    tls: ssl.SSLContext | None

    def __str__(self) -> str:
        return f"mqtt{'s' if self.tls else ''}://{self.host}:{self.port}"


def servers_of(urls: str, *, access: NatsAccess, insecure: bool) -> tuple[MqttServer, ...]:
    """The servers of a comma-separated list of URLs.

    Args:
        insecure: allow plain text off loopback. With `access.tls_ca_path` all is encrypted.

    Raises:
        ConfigError: a URL or a file does not fit; names the field.
    """
    if importlib.util.find_spec("aiomqtt") is None:
        raise ConfigError("mqtt_url: needs the package aiomqtt (pip install 'aryl[mqtt]')")
    for name in ("nkey_seed_path", "credentials_path"):
        if getattr(access, name) is not None:
            raise ConfigError(f"{name}: MQTT knows user and password alone; put them into mqtt_url")
    return tuple(_server_of(url.strip(), access, insecure) for url in urls.split(","))


def _server_of(url: str, access: NatsAccess, insecure: bool) -> MqttServer:
    parts = natsrules.parts_of(url, "mqtt_url")
    host, port = parts.hostname, parts.port
    shown = natsrules.redacted(url)
    if parts.scheme not in ("mqtt", "mqtts") or not host or parts.path.strip("/"):
        raise ConfigError(f"mqtt_url: {shown!r} is not mqtt://host:port or mqtts://host:port")
    is_tls = parts.scheme == "mqtts" or access.tls_ca_path is not None
    if not (is_tls or insecure or natsrules.is_loopback(host)):
        raise ConfigError(
            f"mqtt_url: {shown} is plain text to another machine; use mqtts://, or set"
            " insecure = true"
        )
    tls = natsrules.trust(access.tls_ca_path) or ssl.create_default_context() if is_tls else None
    return MqttServer(
        host=host,
        port=port or (TLS_PORT if is_tls else PLAIN_PORT),
        user=None if parts.username is None else unquote(parts.username),
        password=None if parts.password is None else unquote(parts.password),
        tls=tls,
    )
