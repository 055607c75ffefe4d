"""What things cost: profiles of models on GPUs, interference, and the one device model."""
