"""Tenants in the engine: their settings as policies see them, and what is refused of decisions.

Must not know policies by name. Every decision of a pass goes through here, whoever took it: a
policy that does not keep to quotas and guarantees by itself is refused what breaks them.
"""

from __future__ import annotations

from functools import lru_cache

from coordinator.engine.commands import Refused
from coordinator.engine.context import Context
from coordinator.engine.settings import EngineSettings, TenantSettings
from coordinator.policies.decisions import Decision
from coordinator.policies.snapshot import ClusterSnapshot, TenantView
from coordinator.policies.tenants.guarding import guarded


def views(settings: EngineSettings) -> tuple[TenantView, ...]:
    """The tenants of the cell, by name."""
    return _views(settings.tenants) if settings.tenants else ()


@lru_cache(maxsize=16)  # each snapshot asks for those of the same settings
def _views(tenants: tuple[TenantSettings, ...]) -> tuple[TenantView, ...]:
    return tuple(
        TenantView(
            name=tenant.name,
            parent=tenant.parent,
            weight=tenant.weight,
            guarantee_gpus=tenant.guarantee_gpus,
            borrow_limit_gpus=tenant.borrow_limit_gpus,
            lend_limit_gpus=tenant.lend_limit_gpus,
        )
        for tenant in sorted(tenants, key=lambda tenant: tenant.name)
    )


def allowed(
    ctx: Context, snapshot: ClusterSnapshot, decisions: tuple[Decision, ...]
) -> tuple[Decision, ...]:
    """The decisions that tenants allow; the others are refused, each with the reason."""
    if not snapshot.tenants:
        return decisions
    kept, dropped = guarded(snapshot, decisions)
    for each in dropped:
        ctx.refused.append(Refused(decision=each.decision, why=each.why))
    ctx.state.counters.decisions_refused += len(dropped)
    return kept
