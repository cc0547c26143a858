"""The rules of the protocol, and nothing else: no IO, clock, randomness, tensors or await."""
