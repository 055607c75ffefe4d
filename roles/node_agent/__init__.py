"""The node agent: processes and GPU slices of one host."""
