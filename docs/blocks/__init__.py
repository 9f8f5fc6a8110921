"""The generated blocks of the documentation: an explicit table, no registration by import.

To add one, write a function that returns its
Markdown, name it here, and put its two markers into the page where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from blocks import (
    commands,
    life_cycles,
    metrics,
    nats,
    pages,
    policies,
    policy_code,
    reliability,
    settings,
    wire,
)

Blocks = Mapping[str, Callable[[], str]]

BLOCKS: Blocks = {
    "node life cycle": life_cycles.node_life_cycle,
    "job life cycle": life_cycles.job_life_cycle,
    "subjects": wire.subject_table,
    "node messages": wire.node_messages,
    "api messages": wire.api_messages,
    "message parts": wire.message_parts,
    "commands": commands.command_reference,
    "exit codes": commands.exit_code_table,
    "nats users": nats.nats_users,
    "agent settings": settings.agent_settings,
    "coordinator settings": settings.coordinator_settings,
    "job file": settings.job_file,
    "agent metrics": metrics.agent_metrics,
    "coordinator metrics": metrics.coordinator_metrics,
    "cell metrics": metrics.cell_metrics,
    "policies": policies.policy_list,
    "policy code": policy_code.policy_code,
    "joint knobs": policies.joint_knobs,
    "policy knobs": policies.knob_table,
    "sweep keys": policies.sweep_keys,
    "scenarios": policies.scenario_table,
    "reliability run": reliability.run,
    "reliability promises": reliability.promises,
    "reliability ends": reliability.ends,
    "reliability times": reliability.times,
    "reliability faults": reliability.faults,
    "pages": pages.page_list,
    "decisions": pages.decision_list,
}
