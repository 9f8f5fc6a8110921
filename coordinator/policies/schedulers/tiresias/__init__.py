"""Tiresias (NSDI'19): attained service, in queues or by Gittins index.

Start at `policy`.
"""
