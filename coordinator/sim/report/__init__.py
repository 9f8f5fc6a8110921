"""Reports of a run: figures, series, plots, a page.

Start at `measures`; `page` writes HTML that loads nothing from outside.
"""
