"""A version, made by one rank or by several, until the pointer names it."""
