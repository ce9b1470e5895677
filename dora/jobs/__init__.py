"""Runs as Python objects: started in processes of their own, and read from their folders."""
