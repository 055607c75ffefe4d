"""`tenuto profile`: a process for every share of the device, and one that puts together what they saw."""
