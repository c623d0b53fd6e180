"""Proving, seeding and repairing the bytes of a local checkpoint."""
