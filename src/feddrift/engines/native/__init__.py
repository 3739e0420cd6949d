"""Loops for small networks that Numba compiles for the CPU."""
