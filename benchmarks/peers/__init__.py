"""Tenuto beside other model servers: the same sleeping model, the same open-loop load, goodput within an SLO.

    python -m benchmarks.peers install   # each peer, or those after --peers, into an environment of its own
    python -m benchmarks.peers [--json FILE]   # measure Tenuto and what is installed

`catalog.py` says what is measured and how each peer may be tuned, `servers/` what each of them runs, `serving.py` starts it,
`sender.py` sends, `search.py` finds the highest good rate, `measure.py` and `run.py` put it together; `closed_loop.py` and
`cpu_cost.py` ask other things of the same contenders.
"""
