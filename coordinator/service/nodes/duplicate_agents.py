"""Decides which agent speaks for a node when several report under its name. Pure; takes `now_s`.

An agent is one start of the program (`instance`) on one boot of a machine. On one machine a later
agent replaces an earlier one: an agent that was replaced never reports again, and a boot that ended
never comes back. A machine also cannot have been up for longer than its previous boot was silent.
An agent that breaks these rules is a rival: a second machine (a cloned image, a copied agent.toml)
or a second agent with a state_dir of its own. A rival is accepted only when the other agent has
fallen silent.

Another start on the same boot is a restart if it holds the state directory of the agent before it
(`follows`), which is over then. Two containers of one host would not state that; then a few missing
reports are the proof.
"""

from __future__ import annotations

from msgspec import Struct, field

from common.messages import NodeReport
from common.model import NodeName

REPLACED_KEPT = 8
"""Agents of one node; an older predecessor that is back would count as new, once more."""
MISSED = 3
"""A speaker that misses this many reports was restarted, if another start of its boot reports. One
may be lost, and the next be late."""
PERIOD_S = 1.0
"""Between two reports of an agent that does not state it: the default of its settings."""
NUMBER_S = 1e-3
"""An agent numbers its reports by its boot clock, in milliseconds."""


class _Rival(Struct):
    """A rival: its identity, since when it reports, and its last report."""

    boot_id: str
    instance: str
    since_s: float
    at_s: float


class _Speaker(Struct):
    """The speaker: its identity, its last report, and its predecessor."""

    boot_id: str
    instance: str
    at_s: float
    period_s: float = PERIOD_S
    """Between two of its reports."""
    boots: list[str] = field(default_factory=list[str])
    """Boots that ended, oldest first."""
    instances: list[str] = field(default_factory=list[str])
    """Of this boot: agents that ended, oldest first."""
    rival: _Rival | None = None


class Rivals:
    """Admits the reports of one agent per node.

    Args:
        patience_s: a speaker that is silent this long is replaced by a rival. A rival that reports
            for this long is reported, and one that is silent this long is forgotten. Reports that
            were only late, or came all at once, are thus dropped without a message.
    """

    def __init__(self, *, patience_s: float) -> None:
        self.dropped_count = 0
        """Reports of rivals, and late ones of agents that were replaced."""
        self._patience_s = patience_s
        self._speakers: dict[NodeName, _Speaker] = {}

    def admit(self, report: NodeReport, *, now_s: float, silent_s: float) -> bool:
        """True if a report is of the agent that speaks for its node, which this report may decide.

        silent_s: since the speaker's last report, not counting pauses of this coordinator.
        """
        node, instance = NodeName(report.node), report.instance
        speaker = self._speakers.get(node)
        if speaker is None:
            speaker = self._speakers[node] = _Speaker(report.boot_id, instance, now_s)
        elif not self.speaks(report):
            is_possible = self._may_follow(report, speaker, now_s=now_s, silent_s=silent_s)
            if not is_possible and silent_s <= self._patience_s:
                self.dropped_count += 1
                self._met(speaker, report, now_s)
                return False
            _replace(speaker, report.boot_id, instance)
        speaker.at_s = now_s
        speaker.period_s = report.period_s
        return True

    def speaks(self, report: NodeReport) -> bool:
        """True if a report is of the agent that speaks for its node."""
        speaker = self._speakers.get(NodeName(report.node))
        said = (report.boot_id, report.instance)
        return speaker is not None and (speaker.boot_id, speaker.instance) == said

    def prefer(self, node: NodeName, boot_id: str) -> bool:
        """Let the rival speak whose boot the node had under the previous leader.

        Returns:
            Whether that changed the speaker.
        """
        speaker = self._speakers.get(node)
        rival = None if speaker is None else speaker.rival
        if speaker is None or rival is None or rival.boot_id != boot_id:
            return False
        if speaker.boot_id == boot_id:
            return False
        _replace(speaker, rival.boot_id, rival.instance)
        return True

    def _may_follow(
        self, report: NodeReport, speaker: _Speaker, *, now_s: float, silent_s: float
    ) -> bool:
        """Whether one machine can have made this report after those of the speaker."""
        if report.boot_id == speaker.boot_id:
            if report.instance in speaker.instances:
                return False
            is_proven = report.follows is not None and report.follows == speaker.instance
            return is_proven or silent_s >= min(MISSED * speaker.period_s, self._patience_s)
        up_s = report.sequence * NUMBER_S
        off_s = now_s - speaker.at_s
        return report.boot_id not in speaker.boots and up_s <= off_s + self._patience_s

    def _met(self, speaker: _Speaker, report: NodeReport, now_s: float) -> None:
        """Choose the first of several rivals, so that the text does not change each second."""
        rival = speaker.rival
        if rival is None or now_s - rival.at_s > self._patience_s:
            rival = speaker.rival = _Rival(
                report.boot_id, report.instance, since_s=now_s, at_s=now_s
            )
        rival.at_s = now_s

    def told(self, node: NodeName, *, now_s: float) -> str:
        """A text that several agents report as a node.

        Empty where that is not so, or not yet known.
        """
        speaker = self._speakers.get(node)
        rival = None if speaker is None else speaker.rival
        if speaker is None or rival is None or now_s - rival.at_s > self._patience_s:
            return ""
        if rival.at_s - rival.since_s <= self._patience_s:
            return ""
        if rival.boot_id == speaker.boot_id:
            who = (
                f"on one machine (boot {_short(rival.boot_id)}), each with a state_dir of its own, "
                "and only one is heard; stop the other"
            )
        else:
            who = (
                f"and the one of boot {_short(speaker.boot_id)} is heard, the one of boot "
                f"{_short(rival.boot_id)} is not; give that machine a name of its own"
            )
        return f"two agents report as {node}, {who}: nothing new starts here until then"


def _replace(speaker: _Speaker, boot_id: str, instance: str) -> None:
    if boot_id == speaker.boot_id:
        speaker.instances = _kept(speaker.instances, speaker.instance, back=instance)
    else:
        speaker.boots = _kept(speaker.boots, speaker.boot_id, back=boot_id)
        speaker.instances = []
    if speaker.rival is not None and speaker.rival.boot_id == boot_id:
        speaker.rival = None
    speaker.boot_id, speaker.instance = boot_id, instance


def _kept(replaced: list[str], last: str, *, back: str) -> list[str]:
    return [one for one in (*replaced, last) if one != back][-REPLACED_KEPT:]


def _short(boot_id: str) -> str:
    """Enough of it to distinguish two machines (/proc/sys/kernel/random/boot_id)."""
    return boot_id[:8]
