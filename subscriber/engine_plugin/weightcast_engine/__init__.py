"""weightcast inside an inference engine: changed words go straight into its live weights.

A distribution of its own, without dependencies: torch, numpy, safetensors and the engine are there already.
Nothing is imported from the rest of weightcast. docs/engines.md says how it is turned on, docs/FORMAT.md what
it reads.
"""

VERSION = "0.1.0"
FORMAT = 1
