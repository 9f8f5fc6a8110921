"""Deadline schedulers: EDF, QoS shares and ElasticFlow (ASPLOS'23).

Start at `family`; `edf`, `policy` and `elasticflow` are its members, and `planning` makes their
plans.
"""
