"""What surrounds a run whose flags are accepted: its plan, its cluster, signals, and why it ended.

In reading order:

    plan.py        the run on paper: memory, tokens, time, disk
    cluster.py     the nodes that it has joined
    threads.py     the threads that watch it
    interrupts.py  signals, and engines that do not start
    summary.py     how many of its planned steps it has made
    failures.py    why it ended
"""
