"""medfed: federated learning for medical images of uneven quality and labels of uneven reliability."""

__version__ = "0.1.0"
