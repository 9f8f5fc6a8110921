"""The sentences of docs/foresight.md: what the policy does, how to read its figures. Data only."""

from __future__ import annotations

HEAD = """\
# The policy `foresight`

What `foresight` does beyond `aryl`, what each part brings, and what bounds it. Written by
`tools/foresight_page.py` from the runs in `docs/results/foresight/`, which
`tools/play_foresight.py` played; nothing here is typed in but the sentences.

    aryl simulate --workload paper-overload --policy sjf,aryl,foresight
    aryl up --policy foresight

Live, it is a value of `policy` under `[engine]` in the coordinator's settings. Each part is a knob,
so that `foresight:claim_ratio=0` is `foresight` without claims; with all of them off it decides as
`aryl` does, which a test holds.

## What it does

- **Whole nodes** (`separates_at_home`). `aryl` fills holes with flexible workers, and then base
  workers find no hole and open a node that was empty. So base workers end up on almost every node,
  and a gang of a hundred nodes fits none although a quarter of the GPUs is free or flexibly held.
  Here base workers go to training nodes that have some already and flexible workers to those that
  have none. That is defragmentation by free moves: nothing is ever stopped for it.
- **Claims** (`claim_ratio`, `claim_stretch`). Shortest first with skipping starves wide gangs. A
  job that has waited 30 times its shortest running time is tried first; if it does not fit, it
  keeps the nodes on which it can start soonest, for at most half of the time that it has waited.
  Until then these take only work that is over by then, and flexible workers. The bound on its wait
  is in `coordinator/policies/foresight_claims.py`, and a test holds it.
- **Loan lifetimes** (`lifetime_quantile`). By a quantile of the load to come, so many nodes can
  stay away for so long; base workers go to lent nodes only while, at no instant before they end,
  more nodes are held than can stay away. What a reclaim looks ahead (below) is added to the load.
  While nothing is known of the day, a loan is trusted for an hour.
- **Lending by quantile** (`lend_quantile`, the owner's risk). What is lent and taken back follows a
  quantile of the load instead of its last value, slope and day before:
  [forecasts](forecasts.md).
- **Waiting for a natural finish** (`waits_for_finish`) where the deadline of a reclaim allows it.

## How it was measured

Delays are on (starts, drains, resizes, saves, warm-up, restarts), and one message of a hundred is
lost. Parameters were chosen on one trace that is not reported, `paper-overload-6` (its first five
days, first at full size, then on a quarter of the cluster with a quarter of the jobs), and looked
at once on ITP cluster01 so that they harm no small cluster. Three choices came after first runs of
`paper-1`, `paper-overload-1` and `paper-overload-2`, and of cluster03 with another seed: jobs of
one worker age ten times as slowly, loans outlive the median load, and beyond it the load that nodes
are taken back for. These four traces are therefore not untouched; all others are.

Real traces tell neither who is elastic nor who accepts the other GPU type: 20 % and 30 % of the
jobs, drawn by seed, on clusters whose training nodes are used to 80 to 90 % by the trace's mean
demand, beside as many inference nodes with the load of ServeGen's `m-small`.

`body` is the mean queueing of all jobs but those of the rare GPU type of the paper's traces, whose
line no order helps ([workload](workload-paper.md)). Intervals are 95 % over seeds; a single seed
has none. Preemptions count reclaims and whatever else stops a job that had run. The JCT bound is
the mean of T_min, the running time alone at the most workers: no schedule is below it.
"""

TITLES = {
    "paper": "`paper-1` to `paper-5`",
    "paper-overload": "`paper-overload`",
    "itp-cluster02": "ITP cluster02, a real trace",
    "itp-cluster03": "ITP cluster03, a real trace",
    "itp-cluster06": "ITP cluster06, a real trace",
}

BOUNDS = """
## What bounds it

"Possible at most" above is what any policy could reach against `aryl`. It is computed from the
trace: passes happen at multiples of 82 s only (a property of the paper's workload, fitted to its
baseline), so a job waits for the next one at least; and the 504 jobs of the rare type share 24
GPUs, for which one machine of their joint speed that always runs the job with the least left
gives a bound. On `paper-1` to `paper-5` these two are nearly all of `aryl`'s mean queueing: there
is no contention left that a scheduler could remove, so 1.3 is out of reach of *any* policy there.
Under overload the same line leaves hardly more than 1.05 for the mean JCT at the very best; the
column says how much. `body` shows what is left when that line is set aside.
"""

ABLATION = """
## What each part brings

On `paper-overload-1`, `foresight` with one part switched off:

"""

CURVE = """
## Preemptions against waiting

The quantile that loans are to outlive is the owner's price of a preemption: a higher one keeps base
workers away from lent nodes, and they wait for others. Where training is full for hours, as on the
real traces, the lent nodes are worth more than the preemptions: on cluster03 with another seed the
quantiles 0.9, 0.75 and 0.5 gave 29,067, 27,030 and 25,210 s of mean queueing, with 24, 26 and 30
preemptions (`aryl`: 26,511 s and 588). Where hardly anybody waits, as under `paper-overload`, the
careful end costs next to nothing, and whoever wants `foresight` to stop a quarter of the jobs that
`aryl` stops sets 0.9 there; one default serves both only halfway. On `paper-overload-1`:

"""

TAIL = """
## What was tried and left out

On the trace for choosing parameters (quarter size, five days), none of these paid:

- Fungible jobs that loans surely outlive go to lent nodes *first*: longer queueing (567 s instead
  of 462 s) and more preemptions (13 instead of 6), as every job there holds nodes that the next one
  may then not hold.
- Two or three claims at a time: 514 s instead of 462 s, since each keeps nodes from others.
- A resize cost of 30 s, the whole rendezvous, instead of 5 s per worker: 513 s instead of 462 s.
- A careful quantile (0.9) for lifetimes and the median only for jobs that have waited half an hour:
  no fewer preemptions than the median alone, and on cluster03 (another seed) 27,506 s of queueing
  instead of 25,210 s.
- Age alone, without the stretch: on a small cluster where everybody waits for hours it turns
  shortest first into first come, first served (mean queueing 53,527 s instead of 11,127 s on ITP
  cluster01).

Not built: stopping long jobs for much shorter ones (priced preemption), a knapsack value that
counts the queue's wait, and an LSTM ([forecasts](forecasts.md) says how we compare).
"""
