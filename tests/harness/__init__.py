"""The harness of all tests: the three worlds that stand in for a fleet, and what they are made of.

cluster/  pretend nodes, those of the simulator: below the engine itself (`engine`), or as `agents`
          below a whole coordinator (`coordinator`); or nodes whose reports a test writes
          (`scripted_nodes`)
node/     one node: its decisions alone (`life`), an agent on a model of its machine (`agent`), real
          workers (`workers`), a real agent process (`daemon`)
live/     a real cell, each part a process of its own (`cell`), and commands on it (`commands`)

Beside them stand `builders`, which makes specs, views and snapshots, the fakes of the edges
(`fakes`, `fake_clock`), and real servers on free ports (`servers`).
"""
