"""The family that knows deadlines, as policies by name. Must not know the engine."""

from __future__ import annotations

from coordinator.policies.systems.qos.edf import EDF
from coordinator.policies.systems.qos.elasticflow import ELASTICFLOW
from coordinator.policies.systems.qos.policy import QOS

POLICIES = (QOS, ELASTICFLOW, EDF)
