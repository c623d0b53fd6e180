"""A local checkpoint: one directory that weightcast patches in place."""
