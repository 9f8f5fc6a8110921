"""Errors whose type shows whose fault it is."""


class ArylError(Exception):
    """Base of every error that Aryl raises on purpose; never raised itself."""


class ConfigError(ArylError):
    """The operator or the submitter wrote something invalid; names the field."""


class ProtocolError(ArylError):
    """The peer sent something invalid; it is counted and dropped."""


class TransitionError(ArylError):
    """An event that is not in the life-cycle table for this state; nothing changed."""


class Unavailable(ArylError):  # noqa: N818 - a state of the world, not a mistake
    """The world did not answer in time: no bus, no leader, no process."""


class NobodyListens(Unavailable):
    """No listener received the request: it was not carried out."""


class Fenced(ArylError):  # noqa: N818 - a state of the world, not a mistake
    """A coordinator with a higher epoch leads; a program that gets this error must stop acting."""
