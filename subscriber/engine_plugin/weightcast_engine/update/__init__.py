"""A patch, from its file into the live weights of every rank."""
