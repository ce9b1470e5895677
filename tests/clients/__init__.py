"""Unchanged clients and agents of others, which play episodes through the sessions of a run."""
