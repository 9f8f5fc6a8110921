"""Foreign GPU processes: processes on a GPU that belong to no worker or server assigned to it.

A program that crashes and restarts is a new process each time. Processes of one program are logged
once; the next log line counts the ones since.
"""

from __future__ import annotations

from common.messages import process_named
from coordinator.engine.state.context import Context, mark_holders
from coordinator.engine.state.events import NodeReported, TrespassFact
from coordinator.engine.state.tables import NodeEntry, TrespassStory

QUIET_S = 60.0
"""After this long without one, the next process of the same user and program on the same GPU is
logged again. No agent waits longer before it calls a process foreign (`stranger_after_s`).
"""
STORIES_KEPT = 64
"""Per node; processes of older entries are logged again if they are still there."""
PIDS_KEPT = 64
"""In one story; a process that is back after more others came and went counts as one more."""
WHY = "it belongs to no worker and no server of the node; only its owner can end it"


def fold(ctx: Context, node: NodeEntry, event: NodeReported, *, is_new_boot: bool) -> None:
    """While the process is there, no new worker gets its GPU."""
    trespassed = {fact.gpu_uuid: fact.pid for fact in event.trespasses}
    if trespassed != node.trespassed:
        node.trespassed = trespassed
        ctx.changed_nodes[node.name] = None
        mark_holders(ctx, node)
        ctx.needs_pass = ctx.needs_loan_pass = True
    if is_new_boot:
        node.trespass_stories = []  # process ids start over
    here = {(fact.gpu_uuid, fact.pid) for fact in event.trespasses}
    for story in node.trespass_stories:
        is_here = any((story.gpu_uuid, pid) in here for pid in story.pids)
        if story.left_at_s is None and not is_here:
            story.left_at_s = ctx.now_s
    for fact in event.trespasses:
        _tell(ctx, node, fact)
    del node.trespass_stories[:-STORIES_KEPT]


def _tell(ctx: Context, node: NodeEntry, fact: TrespassFact) -> None:
    stories = node.trespass_stories
    known = _story_of(stories, fact)
    if known is None:
        known = TrespassStory(gpu_uuid=fact.gpu_uuid, owner=fact.owner, pids=[])
    else:
        stories.remove(known)  # the one that was looked at last is kept longest
    stories.append(known)
    known.owner = known.owner or fact.owner
    left_at_s, known.left_at_s = known.left_at_s, None
    if fact.pid in known.pids:
        return
    is_quiet_over = left_at_s is not None and ctx.now_s - left_at_s >= QUIET_S
    if known.pids and not is_quiet_over:
        known.untold_count += 1
    else:
        of = f"it is of {fact.owner}; " if fact.owner else ""
        ctx.log_event(
            node.name,
            f"trespass: {process_named(fact.pid)} on {fact.gpu_uuid}",
            f"{of}{WHY}{_untold(known)}",
        )
        known.untold_count = 0
    known.pids = [*known.pids, fact.pid][-PIDS_KEPT:]


def _story_of(stories: list[TrespassStory], fact: TrespassFact) -> TrespassStory | None:
    """The entry that a process belongs to; None if no process like it was there.

    A process that is known stays what it was, whatever it calls itself by now: some programs write
    what they do into their name. Any other one belongs to those of the same user and program. Where
    these are not known, as of one that has gone, it may have come in the place of one
    that has left, and is another one beside one that is still there.
    """
    on_gpu = [one for one in stories if one.gpu_uuid == fact.gpu_uuid]
    for one in on_gpu:
        if fact.pid in one.pids:
            return one
    alike = (one for one in on_gpu if one.owner == fact.owner)
    return next((one for one in alike if fact.owner or one.left_at_s is not None), None)


def _untold(story: TrespassStory) -> str:
    if not story.untold_count:
        return ""
    return f"; {story.untold_count} more of these processes seen since the last report"
