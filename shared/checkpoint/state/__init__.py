"""The durable state of a local checkpoint, and its locks."""
