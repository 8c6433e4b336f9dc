"""Combining updates: averages, weight rules and distances, as functions without state."""
