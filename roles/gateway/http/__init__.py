"""HTTP/1.1: connections, and what is asked on them."""
