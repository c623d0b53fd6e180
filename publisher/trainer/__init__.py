"""What runs in the trainer's process."""
