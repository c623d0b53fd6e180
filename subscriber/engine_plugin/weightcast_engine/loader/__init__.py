"""Where a model's loader puts each tensor of a checkpoint, found without writing anything."""
