"""Readers of the public layouts, one layout a file."""
