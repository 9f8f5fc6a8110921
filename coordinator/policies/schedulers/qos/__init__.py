"""Deadlines: EDF, QoS shares and ElasticFlow (ASPLOS'23).

Start at `family`; `edf`, `policy` and `elasticflow` are its members, `planning` their plan.
"""
