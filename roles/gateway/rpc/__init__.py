"""gRPC: the published service of the Open Inference Protocol."""
