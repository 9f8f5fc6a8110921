"""The deadline schedulers as policies by name."""

from __future__ import annotations

from coordinator.policies.schedulers.qos.edf import EDF
from coordinator.policies.schedulers.qos.elasticflow import ELASTICFLOW
from coordinator.policies.schedulers.qos.policy import QOS

POLICIES = (QOS, ELASTICFLOW, EDF)
