"""Makes the modules of this folder importable from the tests of every room."""
