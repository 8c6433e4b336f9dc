"""``python -m medfed``."""

from medfed.cli import main

main()
