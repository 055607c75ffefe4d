"""Tenuto beside other model servers: the same model, the same open-loop load, goodput within an SLO.

    python -m benchmarks.peers install   # each peer, or those after --peers, into an environment of its own
    python -m benchmarks.peers [--json FILE]   # measure Tenuto and what is installed
    python -m benchmarks.peers --models resnet50 --device cuda   # the same with a real model, and the simulator beside it

`cases.py` says what is measured, `catalog.py` how each peer may be tuned, `servers/` what each of them runs, `serving.py` starts it,
`sender.py` sends, `search.py` finds the highest good rate, `measure.py` and `run.py` put it together; `closed_loop.py` and
`cpu_cost.py` ask other things of the same contenders.

With real models (`real.py`, `bare_model.py`) all servers load the same weights and get the same float32 or int64 tensors: by the
SDK, or as the raw body of a request by HTTP. Peers run them as PyTorch does by itself, eagerly; Tenuto as CUDA graphs, but
for its row "no graphs". All models of a mix have the same SLO and the same rate: their run times on one GPU are close to each other.
`simulated.py` plays the same arrivals on virtual time, with the run times that the device was measured to have.
"""
