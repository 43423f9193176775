"""Checkpoints that stream: pieces of state that are read when they are written, and stored tensors read in parts."""
