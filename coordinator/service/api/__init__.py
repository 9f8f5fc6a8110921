"""Answers to people and programs.

Start at `handlers`; `queries` builds each answer, `explain_job`, `explain_node` and their
siblings give the reasons.
"""
