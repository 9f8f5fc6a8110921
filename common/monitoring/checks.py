"""Checks the settings of a metrics page at a start. An edge: it reads the key's file."""

from __future__ import annotations

import os

from common.errors import ConfigError
from common.key_file import KeyUnreadableError, read_key
from common.monitoring.settings import MetricsSettings, parsed


def check(settings: MetricsSettings) -> None:
    """Check an address, and a key that this account can read.

    A credential may exist for the unit of the daemon alone: a file that is missing is no error.

    Raises:
        ConfigError: names the field.
    """
    parsed(settings.address)
    path = settings.bearer_path
    if path and os.access(path, os.R_OK):
        try:
            read_key(path)
        except KeyUnreadableError as error:
            raise ConfigError(f"metrics.bearer_path: {error}") from None
