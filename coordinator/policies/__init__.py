"""Policies: pure functions from a frozen snapshot to decisions, bundled in one explicit table.

Each module's first line says what it is. Where to begin, and which belong together:

- What goes in and comes out: `snapshot` with `services` and `shapes`, `decisions` with `waits`;
  what a `policy` is. The table is `bundles`; `added` is what other distributions add to it, and
  `names` those that drivers mean by themselves. Knobs: `knob_types`, `knob_text`, `needs`.
- By rules over parts: `passes` is one pass and `pass_decisions` what it says. Order: `queueing`,
  `aged_claims`, `reserving`. Size: `scaling`, `shares`, `knapsack`, `line_weight`, `spanning`.
  Place: `placement` on an `index`, `openings`, `gpu_types`, `bars`. Loans and their end: `loans`,
  `service_nodes`, `reclaim`.
- Jointly: each of the `systems` says who gets how many workers, and `granting` finds the nodes on
  a `floor`. What they share: `pooling`, `turns`, `apps`, `alike`, `quotas_in_use`, `recall`,
  `setbacks`, `placing`, `dividing`, `attained`, `offers`, `auctions`, `deadlines`, `sharing`.
- Around each of them: room by `precedence` of priority, promises to `tenants`, and `resting` after
  a stop or a resize.
- What all ask: `speeds`, `sources`, `never`. In words: `blockers`, `answers`, `sizes_told`,
  `words`.
"""
