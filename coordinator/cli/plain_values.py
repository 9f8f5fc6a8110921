"""Takes the values of options that need no conversion as they are.

typer converts each value by an adapter of pydantic, defaults too, and importing pydantic takes a
third of the CPU time of `aryl status`. A text for a text, a default and the name of a choice need
none of it. All other values go typer's way.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

PLAIN = (str, int, float, bool)
"""Types whose values are taken as they are."""


def spare(command: Any) -> None:
    """Let the parameters of a command, and of all its commands, take plain values as they are."""
    of_command = command.get_params

    def get_params(ctx: Any) -> list[Any]:
        return spared(of_command(ctx))

    command.get_params = get_params
    for each in getattr(command, "commands", {}).values():
        spare(each)


def spared(parameters: list[Any]) -> list[Any]:
    """The parameters of a command (click.Command.get_params), each taking plain values."""
    for parameter in parameters:
        if not isinstance(parameter.process_value, _Taking):
            parameter.process_value = _Taking(parameter)
    return parameters


class _Taking:
    """`process_value` of one parameter (click.Parameter), which converts only what has to be."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        self._whole = parameter.process_value
        self._kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)

    def __call__(self, ctx: Any, value: Any) -> Any:
        """The value as the command gets it; an error is that of typer."""
        parameter = self._parameter
        is_taken, taken = self._taken(value)
        if not is_taken or (parameter.required and parameter.value_is_missing(taken)):
            return self._whole(ctx, value)
        return taken if parameter.callback is None else parameter.callback(ctx, parameter, taken)

    def _taken(self, value: Any) -> tuple[bool, Any]:
        """Whether a value needs no conversion, and what it is."""
        kind = self._kind
        if not isinstance(kind, type):
            return False, None
        if value is None:
            has_many = getattr(self._parameter, "multiple", False) or self._parameter.nargs == -1
            return True, () if has_many else None
        if issubclass(kind, Enum):
            members = {member.value: member for member in kind}
            if isinstance(value, kind):
                return True, value
            return isinstance(value, str) and value in members, members.get(value)
        return kind in PLAIN and type(value) is kind, value
