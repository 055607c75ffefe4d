"""The gateway: requests by HTTP and gRPC, as the Open Inference Protocol has them, to the frontends of a cluster."""
