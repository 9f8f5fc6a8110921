"""The engine: the one owner of mutable cluster state; handle(event, now_s) -> commands.

Each module's first line says what it is. Where to begin, and which belong together:

- The door is `engine`: `events` and `settings` go in, `commands` and each node's `desired` state
  come out, a `record` keeps both. The tables: `state` with its `parts`,
  `loan_entries`, `marks`, `totals`; a handler gets a `context`. What must hold: `invariants`,
  `guarantees`.
- Policies: they see a `view` within `reach` of the fleet, with what `estimates`, `step_times`,
  `resize_costs` and `tenants` know, and what they decide goes through `commit`: `starting`,
  `sharing`, `migrating`, `watching`; `waiting` counts.
- Jobs: `jobs`, `progress`, `stalls` by `step_gaps`, `stores`, `retrying` with `avoiding`, `prerun`
  and `prerun_shape`, `losses`, `borrowing`, `ended`, `lost_orders`, `reservations`. What time does
  to them: `deadlines`, `timeouts`.
- Nodes: `nodes`, `belonging`, `silence`, `refusals`, `trespassing`, `gpu_faults`. What people
  order: `operator`, `draining`, `removing`.
- Loans: `loans`, `awaiting`, `homeward`, `promised`, `returns`, `stages`, `unused`,
  `unknown_loads`.
- After a loss: `ledgers`, `rebuilding`, `doubting`. Over years: `pruning`, `accounting`.
"""
