"""What all placement policies share: the question, the answer, and what differs between two answers."""
