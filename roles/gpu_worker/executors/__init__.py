"""What carries out a batch: torch on a real device, or an emulated one."""
