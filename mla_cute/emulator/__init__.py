"""Runs compiled kernels on the CPU from their PTX: the real host code, an interpreter, and checks that a GPU does not make."""
