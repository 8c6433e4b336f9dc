"""Where a federation runs.  Engines move messages and know no method."""
