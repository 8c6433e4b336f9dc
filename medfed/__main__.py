"""``python -m medfed``."""

from dataclasses import make_dataclass

from medfed.cli import main

try:
    main()
finally:
    # Where an interrupt struck while a string was executed (a dataclass in the making is enough), CPython remembers it
    # and ends ``python -m`` by SIGINT, whatever exit code was asked for. Executing another string makes it forget.
    make_dataclass("Forget", ())
