"""The virtual stage: the same cores on a virtual clock with modelled links and GPUs."""
