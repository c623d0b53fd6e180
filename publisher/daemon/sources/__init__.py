"""Where the daemon finds checkpoints to publish: HTTP queue, watched directory, hand-over."""
