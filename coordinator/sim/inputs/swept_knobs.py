"""Swept knobs: their policies, the option that each replaces, and which have no effect. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from common.errors import ConfigError
from coordinator.policies.knobs import idle
from coordinator.policies.policy import is_unturned, knobs_of, refuse_idle
from coordinator.policies.registry import KNOBS, policy
from coordinator.sim.run.compare import KNOB, Task


def turned(task: Task, name: str, text: str) -> Task:
    """A task with a knob changed, replacing the value of its policy's name or its scenario."""
    policy_text = ":".join(t for t in task.options.policy.split(":") if _knob(t) != name)
    knobs = (*(t for t in task.options.knobs if _knob(t) != name), f"{name}={text}")
    options = structs.replace(task.options, policy=policy_text, knobs=knobs)
    return structs.replace(task, options=options)


def _knob(text: str) -> str:
    """Which one `KNOB=VALUE` turns."""
    return text.partition("=")[0]


def may_use(task: Task, key: str) -> bool:
    """True if a key applies to a task: only knobs are of some policies alone.

    An unknown key counts as applying: reading its value reports the error. So does a knob that has
    no effect here: another swept one may give it one, and `without_idle` looks at them together.
    """
    name = key.removeprefix(KNOB)
    if not key.startswith(KNOB) or name not in KNOBS:
        return True
    return name in knobs_of(policy(task.options.policy))


def without_idle(task: Task) -> Task:
    """A task without the knobs that have no effect next to its swept ones.

    One by one: two may disable each other, and without both of them the run would be another one.
    Those of the name go first, because a row is labelled by its swept values.
    """
    while task.options.knobs and (leave := _idle(task)):
        own, knobs = task.options.policy.split(":"), task.options.knobs
        options = structs.replace(
            task.options,
            policy=":".join(text for text in own if text != leave),
            knobs=tuple(text for text in knobs if text != leave),
        )
        gone = KNOB + _knob(leave) if leave in knobs else ""
        swept = {key: value for key, value in task.swept.items() if key != gone}
        task = structs.replace(task, options=options, swept=swept)
    return task


def _idle(task: Task) -> str:
    """The first knob to leave out, as `KNOB=VALUE`; empty: each decides something.

    What a name may say anywhere stays in it.
    """
    base, *own = task.options.policy.split(":")
    said = (text for text in own if not is_unturned(policy(base), text))
    unused = idle(policy(task.options.policy_text, is_whole=False).knobs)
    texts = (*said, *reversed(task.options.knobs))
    return next((text for text in texts if _knob(text) in unused), "")


def refuse(tasks: Sequence[Task], key: str, value: str) -> None:
    """Report why a knob applies to no policy here.

    Raises:
        ConfigError: always: what the first policy that has it lacks, or that none has it.
    """
    name = key.removeprefix(KNOB)
    bases = dict.fromkeys(task.options.policy.partition(":")[0] for task in tasks)
    for task in tasks:
        made = policy(task.options.policy_text)
        if name in knobs_of(made):
            told = policy(task.options.policy.partition(":")[0])
            refuse_idle(told, made.knobs, name, f"{name}={value}")
    raise ConfigError(f"sweep: none of {', '.join(bases)} has a knob {name}")
