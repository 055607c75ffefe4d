"""The worker processes of a node: started, watched, blamed, adopted, ended."""
