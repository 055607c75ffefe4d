"""What runs in a virtual cluster: the roles, their devices, who asks them, and the connections between them."""
