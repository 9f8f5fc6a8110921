"""The harness of all tests: the three worlds that stand in for a fleet, and what they are made of.

cluster/  pretend nodes, those of the simulator: behind the engine itself (`engine`), behind reports
          that a test writes (`scripted_nodes`), or behind a whole coordinator (`coordinator`)
node/     one node: its decisions alone (`life`), an agent on a model of its machine (`agent`), real
          workers (`workers`), a real agent process (`daemon`)
live/     a real cell, each part a process of its own (`cell`), and commands on it (`commands`)

Beside them stand `builders`, which makes every spec, view and snapshot, the fakes of the edges
(`fakes`, `fake_clock`), and real servers on free ports (`servers`).
"""
