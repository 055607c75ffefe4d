"""Measuring profiles: what to measure (`plan.py`, sans-IO) and how, with torch (`torch.py`)."""
