"""Bytes on storage paths: I/O engines, buffers in host memory, job directories and locks, state files in slots.

Nothing here imports torch.
"""
