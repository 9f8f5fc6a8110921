"""GPU faults: which take a GPU out of use, for how long, and the breaker that limits them.

The driver's recovery action decides, where the driver reports one. A GPU that needs a recovery is
out for as long as it does; a GPU that needs none is not out. Without a reported action the class of
the fault decides. A program's own fault takes no GPU out. Unrelated programs that fail on one GPU
make it suspect, and at `suspect_score_max` it is out.

*Out* means: no work begins on the GPU, and its node is not lent. Running work goes on; it ends by
itself, or an operator drains the node. A node on loan returns as usual. The GPU is in use again
when an operator says so (uncordon), or when its node reboots and reports it clean, except for
faults that need repair.

The breaker: a driver that reports faults on every GPU must not empty the fleet. Beyond
`gpus_out_ratio_max` of all GPUs no more are taken out by class or score, and an operator decides.
The driver's own recovery action still takes a GPU out, because nothing runs there; it counts
towards the ratio.
"""

from __future__ import annotations

import math

from common.messages import GpuHealth, RecoveryAction
from common.model import GpuUuid, NodeName
from coordinator.engine.jobs.gpu_sharing import keys_of
from coordinator.engine.state.context import Context, mark_holders
from coordinator.engine.state.events import FaultClass, GpuFact, GpuFaultFact, NodeReported
from coordinator.engine.state.tables import ClusterState, GpuCondition, GpuOut, NodeEntry, Suspicion
from coordinator.policies.contract.text import counted

OPERATOR = "operator"
SUSPICIONS_KEPT = 16
"""Per GPU; any sensible `suspect_score_max` is far below."""
BY_REBOOT = frozenset({RecoveryAction.NODE_REBOOT, RecoveryAction.SYSTEM_REBOOT})

_ASKED = {
    RecoveryAction.GPU_RESET: "reset the GPU",
    RecoveryAction.NODE_REBOOT: "drain and reboot the node",
    RecoveryAction.DRAIN_P2P: "stop all programs on the GPU and its NVLink peers, then reset it",
    RecoveryAction.DRAIN_AND_RESET: "reset the GPU when nothing runs on it",
    RecoveryAction.RECOVER_IMEX_DOMAIN: "recover the IMEX domain of the node",
    RecoveryAction.BUS_RESET: "reset the GPU by its bus",
    RecoveryAction.SYSTEM_REBOOT: "drain and reboot the system",
    RecoveryAction.UNKNOWN: "see the GPU's recovery action in nvidia-smi -q",
}


def fold(ctx: Context, node: NodeEntry, event: NodeReported) -> None:
    """Take what a report says of its GPUs' faults; the same report again changes nothing."""
    for gpu in event.gpus:
        known = node.gpu_conditions.get(gpu.uuid)
        asks = gpu.recovery not in (None, RecoveryAction.NONE)
        if known is None and not gpu.faults and not asks:
            continue
        condition = node.gpu_conditions.setdefault(gpu.uuid, GpuCondition())
        new = _new(condition, gpu)
        _follow_driver(ctx, node, gpu, condition)
        for fault, count in new:
            _take(ctx, node, gpu, fault, count)


def _new(condition: GpuCondition, gpu: GpuFact) -> list[tuple[GpuFaultFact, int]]:
    """The faults not logged yet, with the count of each; they count as logged from here on.

    A count below the one before comes from a restarted agent or a reloaded driver. A fault that a
    GPU without an answer leaves out is unchanged.
    """
    before, told = condition.counts, {fault.what: fault.count for fault in gpu.faults}
    condition.counts = told if gpu.health == GpuHealth.OK else {**before, **told}
    found: list[tuple[GpuFaultFact, int]] = []
    for fault in gpu.faults:
        known = before.get(fault.what, 0)
        count = fault.count - known if fault.count >= known else fault.count
        if count:
            found.append((fault, count))
    return found


def _follow_driver(ctx: Context, node: NodeEntry, gpu: GpuFact, condition: GpuCondition) -> None:
    """The driver's recovery action takes a GPU out, until the driver asks for none."""
    asked, out = gpu.recovery, condition.out
    condition.is_asked = asked not in (None, RecoveryAction.NONE)
    if asked is None:
        return  # it does not tell, or the GPU does not answer just now
    if asked == RecoveryAction.NONE:
        if out is not None and out.is_drivers:
            _back(ctx, node, gpu.uuid, "its driver asks for no recovery any more")
        return
    what = f"recovery action {asked}"
    if out is not None and out.is_drivers and out.what == what:
        return
    now = GpuOut(
        since_s=ctx.now_s,
        what=what,
        meaning="its driver asks for it",
        owner=OPERATOR,
        next_step=_ASKED[asked],
        is_node=asked in BY_REBOOT,
        is_drivers=True,
    )
    _out(ctx, node, gpu.uuid, now)


def _take(ctx: Context, node: NodeEntry, gpu: GpuFact, fault: GpuFaultFact, count: int) -> None:
    """Carry out what follows from a new fault."""
    condition = node.gpu_conditions[gpu.uuid]
    times = "" if count == 1 else f", {counted(count, 'time')}"
    if fault.kind == FaultClass.INFO:
        if _is_worth_telling(fault, count):
            ctx.log_event(node.name, f"GPU {gpu.uuid}: {fault.what}{times}", fault.meaning)
        return
    takes_out = fault.kind in (FaultClass.GPU, FaultClass.NODE)
    if takes_out and gpu.recovery is None:
        if condition.out is not None and _is_worth_telling(fault, count):
            ctx.log_event(node.name, f"GPU {gpu.uuid}: {fault.what}{times}", fault.meaning)
        out = GpuOut(
            since_s=ctx.now_s,
            what=fault.what,
            meaning=fault.meaning,
            owner=fault.owner or OPERATOR,
            next_step=fault.next_step,
            is_node=fault.kind == FaultClass.NODE,
            needs_repair=fault.needs_repair,
        )
        _out_or_held_back(ctx, node, gpu.uuid, out)
        return
    if _is_worth_telling(fault, count):
        asks = "; its driver asks for no recovery" if gpu.recovery == RecoveryAction.NONE else ""
        said = f"{fault.meaning}{asks}" if takes_out else f"{fault.meaning}: the job's own fault"
        ctx.log_event(node.name, f"GPU {gpu.uuid}: {fault.what}{times}", said)
    _suspect(ctx, node, gpu.uuid, condition, fault)


def _is_worth_telling(fault: GpuFaultFact, count: int) -> bool:
    """True if a storm's count has doubled since it was last logged."""
    return (fault.count - count).bit_length() < fault.count.bit_length()


# --- suspects -----------------------------------------------------------------------------------


def _suspect(
    ctx: Context, node: NodeEntry, uuid: GpuUuid, condition: GpuCondition, fault: GpuFaultFact
) -> None:
    """Remember which program had the fault; several programs with faults make a GPU suspect."""
    programs = _programs(ctx, node, uuid)
    kept = [one for one in condition.suspicions if one.program not in programs]
    kept += [Suspicion(program, ctx.now_s) for program in programs]
    condition.suspicions = kept[-SUSPICIONS_KEPT:]
    score = suspect_score(condition, ctx.now_s, half_life_s=ctx.settings.suspect_half_life_s)
    if score < ctx.settings.suspect_score_max:
        return
    names = counted(len(condition.suspicions), "program")
    _out_or_held_back(
        ctx,
        node,
        uuid,
        GpuOut(
            since_s=ctx.now_s,
            what=f"{fault.what}, suspect score {score:.1f}",
            meaning=f"{names} with nothing in common failed on it",
            owner=OPERATOR,
            next_step="test the GPU (dcgmi diag -r 3)",
            needs_repair=True,
        ),
    )


def _programs(ctx: Context, node: NodeEntry, uuid: GpuUuid) -> list[str]:
    """The program that ran on a GPU: trials of one app are one program, and so are tries of one
    job.
    """
    slot = next((slot for slot in node.gpus if slot.uuid == uuid), None)
    jobs = [ctx.job(key.job_id) for key in keys_of(slot)] if slot is not None else []
    found = {f"{job.tenant}/{job.spec.app}" if job.spec.app else job.job_id for job in jobs if job}
    return sorted(found)


def suspect_score(condition: GpuCondition, now_s: float, *, half_life_s: float) -> float:
    """Programs that had faults of their own on a GPU, each less the longer that is ago."""
    return sum(math.exp2((one.at_s - now_s) / half_life_s) for one in condition.suspicions)


# --- out and back -------------------------------------------------------------------------------


def _out_or_held_back(ctx: Context, node: NodeEntry, uuid: GpuUuid, out: GpuOut) -> None:
    """Take a GPU out, unless too much of the fleet is out already."""
    condition = node.gpu_conditions[uuid]
    was = condition.out
    if was is not None and (was.is_drivers or (was.is_node, was.needs_repair) >= _weight(out)):
        return  # it is out for as much
    if not _has_room(ctx, node, uuid, out):
        if condition.held_back is None:
            ctx.log_event(node.name, f"GPU {uuid} stays in use", f"{_said(out)}; {why_open(ctx)}")
        condition.held_back = out
        if ctx.state.breaker_since_s is None:
            ctx.state.breaker_since_s = ctx.now_s
            ctx.log_event("cell", "GPU breaker open", why_open(ctx))
        return
    _out(ctx, node, uuid, out)


def _weight(out: GpuOut) -> tuple[bool, bool]:
    return out.is_node, out.needs_repair


def _has_room(ctx: Context, node: NodeEntry, uuid: GpuUuid, out: GpuOut) -> bool:
    """Whether so much of the fleet may be out."""
    more = {slot.uuid for slot in node.gpus} if out.is_node else {uuid}
    more -= _out_of(node)
    there, are_out = shares(ctx.state)
    return are_out + len(more) <= most_out(ctx, there)


def shares(state: ClusterState) -> tuple[int, int]:
    """GPUs of the cell, and how many of them are out."""
    nodes = state.nodes.values()
    return sum(len(node.gpus) for node in nodes), sum(map(out_count, nodes))


def out_count(node: NodeEntry) -> int:
    """GPUs of a node on which nothing new begins after a fault."""
    return len(_out_of(node))


def most_out(ctx: Context, gpus: int) -> int:
    """The number of the cell's GPUs that may be out without an operator."""
    return max(ctx.settings.gpus_out_min, int(ctx.settings.gpus_out_ratio_max * gpus))


def _out_of(node: NodeEntry) -> set[GpuUuid]:
    if not node.gpu_conditions:
        return set()
    there = {slot.uuid for slot in node.gpus}
    return there if node.is_out else there & node.out_uuids


def _out(ctx: Context, node: NodeEntry, uuid: GpuUuid, out: GpuOut) -> None:
    condition = node.gpu_conditions[uuid]
    condition.out, condition.held_back = out, None
    what = f"GPU {uuid} is out" + (", and its node" if out.is_node else "")
    ctx.log_event(node.name, what, f"{_said(out)}; running work continues")
    _changed(ctx, node)


def _back(ctx: Context, node: NodeEntry, uuid: GpuUuid, why: str) -> None:
    condition = node.gpu_conditions[uuid]
    if condition.out is not None:
        ctx.log_event(node.name, f"GPU {uuid} is in use again", why)
    condition.out = condition.held_back = None
    condition.suspicions = []
    _changed(ctx, node)
    _close_breaker(ctx)


def _changed(ctx: Context, node: NodeEntry) -> None:
    ctx.changed_nodes[node.name] = None
    mark_holders(ctx, node)
    ctx.needs_pass = ctx.needs_loan_pass = True


def rebooted(ctx: Context, node: NodeEntry, event: NodeReported) -> None:
    """A reboot has reset the GPUs; those reported clean are in use again."""
    facts = {gpu.uuid: gpu for gpu in event.gpus}
    for uuid, condition in sorted(node.gpu_conditions.items()):
        condition.counts = {}
        gpu = facts.get(uuid)
        if gpu is None or not _is_clean(gpu):
            continue
        found = condition.out or condition.held_back
        if found is not None and not found.needs_repair:
            _back(ctx, node, uuid, "its node rebooted")
    _forget(node)


def _is_clean(gpu: GpuFact) -> bool:
    return (
        gpu.health == GpuHealth.OK
        and gpu.recovery in (None, RecoveryAction.NONE)
        and all(fault.kind in (FaultClass.INFO, FaultClass.JOB) for fault in gpu.faults)
    )


def mended(ctx: Context, node: NodeEntry, why: str) -> None:
    """An operator says that a node may be used again: so may its GPUs, unless the driver of one
    still asks for a recovery."""
    for uuid, condition in sorted(node.gpu_conditions.items()):
        if condition.out is not None and condition.out.is_drivers and condition.is_asked:
            said = f"its driver still asks for {condition.out.what}: {condition.out.next_step}"
            ctx.log_event(node.name, f"GPU {uuid} stays out", said)
        elif condition.out is not None or condition.held_back is not None:
            _back(ctx, node, uuid, why)
    _forget(node)


def _forget(node: NodeEntry) -> None:
    """Conditions that say nothing, which `fold` makes again."""
    node.gpu_conditions = {
        uuid: one
        for uuid, one in node.gpu_conditions.items()
        if one.counts or one.suspicions or one.out or one.held_back or one.is_asked
    }


def _close_breaker(ctx: Context) -> None:
    if ctx.state.breaker_since_s is None:
        return
    there, are_out = shares(ctx.state)
    is_held_back = any(
        one.held_back for node in ctx.state.nodes.values() for one in node.gpu_conditions.values()
    )
    if are_out <= most_out(ctx, there) and not is_held_back:
        ctx.state.breaker_since_s = None
        ctx.log_event("cell", "GPU breaker closed", f"{are_out} of {there} GPUs are out")


# --- in words -----------------------------------------------------------------------------------


def why_open(ctx: Context) -> str:
    """In words, why no further GPU is taken out."""
    there, are_out = shares(ctx.state)
    return (
        f"{are_out} of {there} GPUs are out, and no more than {most_out(ctx, there)} may be by "
        "themselves: a faulty driver may report every GPU; an operator decides (aryl node cordon, "
        "aryl node uncordon)"
    )


def told(ctx: Context, node: NodeEntry) -> list[str]:
    """In words, each GPU of a node that is out, held back or suspect."""
    found: list[str] = []
    for uuid, condition in sorted(node.gpu_conditions.items()):
        half_life_s = ctx.settings.suspect_half_life_s
        score = suspect_score(condition, ctx.now_s, half_life_s=half_life_s)
        if (out := condition.out) is not None:
            on = "on the whole node" if out.is_node else "on it"
            ago_s = max(0.0, ctx.now_s - out.since_s)
            found.append(
                f"GPU {uuid} is out since {ago_s:.0f} s: {_said(out)}; nothing new begins {on}, "
                f"running work continues; {_until(node.name, out)}"
            )
        elif condition.held_back is not None:
            found.append(
                f"GPU {uuid} would be out, but for the breaker: {_said(condition.held_back)} "
                f"(aryl node cordon {node.name}, or aryl node uncordon {node.name} to dismiss it)"
            )
        elif score >= 1:
            most = ctx.settings.suspect_score_max
            found.append(f"GPU {uuid} is suspect: score {score:.1f} of {most:g}")
    return found


def _said(out: GpuOut) -> str:
    step = f"; next, by the {out.owner}: {out.next_step}" if out.next_step else ""
    return f"{out.what}: {out.meaning}{step}" if out.meaning else f"{out.what}{step}"


def _until(name: NodeName, out: GpuOut) -> str:
    if out.is_drivers:
        return "until its driver asks for no recovery any more"
    reboot = "" if out.needs_repair else "until its node reboots and reports it clean, or "
    return f"{reboot}until aryl node uncordon {name}"
