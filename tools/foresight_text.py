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
  Until then these take only work that is over by then, and flexible workers. The bound, as
  estimates hold: with R the longest that a running job has left, the oldest job that aged starts
  R after it has waited for 2 R or for 30 times its own length, whichever is the larger. A job of
  one worker ages ten times as slowly, at 300 times its length, however many GPUs the worker has.
  In plain words: a job of three hours on whole nodes may wait 90 hours before anything is kept for
  it, and one of three hours on one whole node, which is one worker, 900 hours. That keeps wide
  short jobs from starving, and promises nothing that matters to long ones; a lower `claim_stretch`
  does, at the price of the order. A test holds the bound with the knobs as they are shipped.
- **Loan lifetimes** (`lifetime_quantile`). By a quantile of the load to come, so many nodes can
  stay away for so long; base workers go to lent nodes only while, at no instant before they end,
  more nodes are held than can stay away. What a reclaim looks ahead (below) is added to the load.
  What is not known forbids nothing: until the load's first day was seen, base workers go to lent
  nodes as those of `aryl` do. It looks at a job's end alone: one that will have saved just before
  the load comes back, and so would lose little, is kept away like any other.
- **Lending by quantile** (`lend_quantile`, the owner's risk). What is lent and taken back follows a
  quantile of the load instead of its last value, slope and day before:
  [forecasts](forecasts.md).
- **Waiting for a natural finish** (`waits_for_finish`) where the deadline of a reclaim allows it.

## How it was measured

Delays are on (starts, drains, resizes, saves, warm-up, restarts), and one message of a hundred is
lost. Parameters were chosen on one trace that is not reported, `paper-overload-9` (its first five
days, first at full size, then on a quarter of the cluster with a quarter of the jobs), and looked
at once on ITP cluster01 so that they harm no small cluster. Three choices came after first runs of
`paper-overload-2`, of draws that are no longer among the named ones, and of cluster03 with another
seed: jobs of one worker age ten times as slowly, loans outlive the median load, and beyond it the
load that nodes are taken back for. A fourth was made last: the count of nodes that are held
already was too careful, as a job that joins others on a node holds none more until these end. It
was corrected with seeds 1 to 3 of cluster02, 1 and 2 of cluster03 and cluster06, and short cuts of
other traces before our eyes. Untouched are therefore `paper-1` to `paper-5`, the overloads but
`paper-overload-2`, and the other seeds of the real traces.

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

**Where it is worse than `aryl`.** On three of the five seeds of cluster06 jobs wait longer, on one
of them 1.8 times as long, for a sixth of the preemptions. On that one (18,734 s against `aryl`'s
10,338) no single part is the cause: it is 12,758 s without whole nodes, 14,863 without lending by
quantile, 15,705 without lifetimes, 19,176 without claims (these four runs are not kept). A cluster
of 13 nodes that is full for hours has nothing to spare for what these parts keep free. Under
overload it stops more jobs than `aryl`, though few of either: what it puts on lent nodes that
outlive the median load is preempted when the load does not.
"""

ABLATION = """
## What each part brings

On `paper-overload-1`, `foresight` with one part switched off:

"""

CURVE = """
## Preemptions against waiting

The quantile that loans are to outlive is the owner's price of a preemption: a higher one keeps base
workers away from lent nodes, and they wait for others. Where training is full for hours, the lent
nodes are worth more than the preemptions that a higher one saves: on a cut of cluster06 jobs waited
longer at 0.75 than at 0.5, and longer still at 0.9 (these runs are not kept). One default cannot
serve both kinds of cells best. On `paper-overload-1`:

"""

TAIL = """
## What was tried and left out

On the trace for choosing parameters (quarter size, five days) none of these paid. Their runs are
not kept, and were made with the older count of held nodes, so no figure is given:

- Fungible jobs that loans surely outlive go to lent nodes *first*: longer queueing and more
  preemptions, as every job there holds nodes that the next one may then not hold.
- Two or three claims at a time: longer queueing, since each keeps nodes from others.
- A resize cost of the whole rendezvous instead of the default per worker: longer queueing.
- A careful quantile for lifetimes, and the median only for jobs that have waited half an hour: no
  fewer preemptions than the median alone, and longer queueing on a real trace.
- Age alone, without the stretch: on a small cluster where everybody waits for hours it turns
  shortest first into first come, first served.

## What is not built

- A knapsack value that counts the queue's wait as well as the job's own. Base gangs are admitted
  first and take flexible workers' GPUs whenever they fit with them, so whoever waits does so where
  no flexible worker is in the way, and its wait is no cost of one in the same pass. What one costs
  later starts is its resize (`resize_cost_s`, a row above) and the hole that it leaves on a node
  (`separates_at_home`, another row). Whether a value for jobs still to come would pay was not
  measured.
- Loan lifetimes by checkpoints: work that saves before a loan ends is not told from work that does
  not.
- Stopping long jobs for much shorter ones (priced preemption).
- An LSTM ([forecasts](forecasts.md) says how we compare).
"""
