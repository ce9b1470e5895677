"""DORA as a Python library: what is public, settings, runs as objects, and real notebook kernels."""
