"""What every role's process stands on: cores and their driver, processes, run files, the journal."""
