"""How the scheduler plans anew while it serves: what is wanted, the plan for it, and the moves that lead there."""
