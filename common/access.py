"""Why NATS refuses a connection: each cause, and the operator's remedy. Pure."""

from __future__ import annotations

from enum import StrEnum

from common.errors import Unavailable


class Cause(StrEnum):
    """The obstacle between a program and NATS.

    `server`: no nats-server answers at the address. `tls`: one answers, and its TLS cannot be
    trusted. `credentials`: it does not know the user, the password or the key. `permission`: it
    knows the user, and gives it no right to this subject.
    """

    SERVER = "server"
    TLS = "tls"
    CREDENTIALS = "credentials"
    PERMISSION = "permission"


ADVICE = {
    Cause.SERVER: (
        "check host and port of the NATS URL (nats_url, --nats-url or ARYL_NATS_URL), and on that "
        "machine `systemctl status aryl-nats`"
    ),
    Cause.TLS: (
        "tls_ca_path must name the CA that signed the server's certificate, and the NATS URL a "
        "host that the certificate names"
    ),
    Cause.CREDENTIALS: (
        "compare user and password of the NATS URL, or the nkey, with `authorization` in the "
        "server's users.conf; `systemctl reload aryl-nats` takes new users"
    ),
    Cause.PERMISSION: (
        "compare cell, node, tenant and user with the permissions of this NATS user in users.conf; "
        "`aryl nats-permissions` prints what each identity needs"
    ),
}
"""The remedy by cause; it holds for a fleet and for one machine."""
IS_LASTING = frozenset({Cause.TLS, Cause.CREDENTIALS})
"""Causes that another attempt does not change."""


class AccessError(Unavailable):
    """NATS does not let this program do its part; `cause` gives the reason."""

    def __init__(self, message: str, cause: Cause) -> None:
        super().__init__(message)
        self.cause = cause
