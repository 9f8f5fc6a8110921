"""Background tasks of the node driver, one asyncio task each, so none blocks another.

Storage, a shim or a command may take its whole time limit. A step that waited for it would delay
the node's reports, its return from a loan, and all other work.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Hashable
from typing import Any, NamedTuple

log = logging.getLogger(__name__)


class _Errand(NamedTuple):
    what: object
    droppable: Hashable


class Errands:
    """Background tasks under way; an error in one is raised at the next check, or else logged.

    Args:
        on_failure: called when a task ended in an error, which `raise_failure` raises.
    """

    def __init__(self, *, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._tasks: dict[asyncio.Task[None], _Errand] = {}
        self._failure: BaseException | None = None
        self._failed_name = ""
        self._is_told = False

    def begin(
        self,
        doing: Coroutine[Any, Any, None],
        *,
        name: str,
        what: object = None,
        droppable: Hashable = None,
    ) -> None:
        """Start a background task.

        what: names the task for `is_under_way`.
        droppable: the name under which `drop_all_but` keeps it; a task with None is never dropped.
        """
        task = asyncio.create_task(doing, name=name)
        self._tasks[task] = _Errand(what, droppable)
        task.add_done_callback(self._over)

    def is_under_way(self, what: object) -> bool:
        """True if a task of this name has begun and is not over."""
        return any(errand.what == what for errand in self._tasks.values())

    def _over(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._failure is not None:  # only the first is raised
            _log(task.get_name(), error)
            return
        self._failure, self._failed_name = error, task.get_name()
        self._on_failure()

    def raise_failure(self) -> None:
        """Raise the error of a failed task; do nothing if no task has failed.

        Raises:
            BaseException: the error that ended a background task.
        """
        if self._failure is not None:
            self._is_told = True
            raise self._failure

    def drop_all_but(self, kept: Collection[Hashable]) -> None:
        """Cancel the droppable tasks that are not named here.

        Their results are no longer needed.
        """
        for task, errand in self._tasks.items():
            if errand.droppable is not None and errand.droppable not in kept:
                task.cancel()

    async def close(self) -> None:
        """Cancel all tasks, and return when they have ended.

        No caller checks any more, so an error that was not raised is logged.
        """
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        # `_over` has run for each when this returns: it was to be called back first.
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._failure is not None and not self._is_told:
            _log(self._failed_name, self._failure)
            self._is_told = True


def _log(name: str, error: BaseException) -> None:
    log.error("%s: %s: %s", name, type(error).__name__, error, exc_info=error)
