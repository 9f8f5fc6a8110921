"""The coordinator's metrics page.

`table` names the metrics, `measures` keeps what passes by, `cell_state` reads the engine's state,
and `page` joins them.
"""
