"""Errors whose type shows whose fault it is."""


class ArylError(Exception):
    """Base of every error that Aryl raises on purpose; never raised itself."""


class ConfigError(ArylError):
    """The operator or the submitter wrote something that does not fit; names the field."""


class ProtocolError(ArylError):
    """The peer sent something that does not fit; it is counted and dropped."""


class TransitionError(ArylError):
    """An event that the life-cycle table does not have in this state; nothing changed."""


class Unavailable(ArylError):  # noqa: N818 - a state of the world, not a mistake
    """The world did not answer in time: no bus, no leader, no process."""


class NobodyListens(Unavailable):
    """Nobody was there to hear the request: it was not carried out."""


class Fenced(ArylError):  # noqa: N818 - a state of the world, not a mistake
    """Somebody with a higher epoch leads; whoever sees this must stop acting."""
