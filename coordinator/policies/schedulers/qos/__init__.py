"""Deadline schedulers: EDF, QoS shares and ElasticFlow (ASPLOS'23).

Start at `policy`, which plans QoS shares; `edf` and `elasticflow` are the others, and `planning`
makes the plans of all.
"""
