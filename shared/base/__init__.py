"""Errors, elements and failpoints: what every other room imports."""
