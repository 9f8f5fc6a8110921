"""Plans: a copy of the engine is played ahead, with a change and without it.

`child` is the process that a coordinator starts for one plan: question in, answer out. `decide`
takes the first instant, `run` the time after it, and `answer` compares the two runs.
"""
