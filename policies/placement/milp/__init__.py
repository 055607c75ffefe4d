"""AO-MILP and WSM-MILP: `packing.py` what shares a GPU, `model.py` the program, `policy.py` on top."""

from policies.placement.milp.policy import Milp

__all__ = ["Milp"]
