"""Answers to people and programs.

Start at `handlers`; `queries` builds each answer, `explain` and its siblings give the reasons.
"""
