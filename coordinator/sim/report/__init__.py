"""What a run was: figures, series, plots, a page.

Start at `measures`; `page` writes HTML without anything from outside.
"""
