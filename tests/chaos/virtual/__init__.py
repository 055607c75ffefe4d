"""A cluster whose processes, clocks and connections are virtual, and a script of what goes wrong in it.

Frontends and workers run in their real shells, schedulers and agents with their real cores and sources; all of them in the real
driver's turns. Only processes, time and ZeroMQ are modelled (`processes/`, `world.py`). docs/testing.md says what each
fault means. One script, one history.
"""
