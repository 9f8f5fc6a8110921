"""The family that knows deadlines, as policies by name. Must not know the engine."""

from __future__ import annotations

from coordinator.policies.qos import QOS
from coordinator.policies.qos_edf import EDF
from coordinator.policies.qos_elasticflow import ELASTICFLOW

POLICIES = (QOS, ELASTICFLOW, EDF)
