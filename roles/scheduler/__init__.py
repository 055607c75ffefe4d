"""The scheduler: queues of request metadata, every slice, the placement."""
