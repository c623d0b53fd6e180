"""Adapters for trainers' own interfaces. Each module imports its framework, and needs it installed."""
