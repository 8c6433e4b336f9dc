"""Reliability of labels: class directions, references, proposals and verdicts, as functions without state."""
