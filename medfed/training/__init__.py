"""What one client does: the trainer, the sharpness-aware step, losses, networks and evaluation."""
