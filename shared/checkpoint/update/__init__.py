"""From a version in the channel to patched files: plan, fetch, stage, patch."""
