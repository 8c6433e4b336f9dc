"""One published method a file: its server program and its client tasks side by side."""
