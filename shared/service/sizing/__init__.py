"""What a run will need, from the size of its weights: `rules` reckons and reads nothing, `shown` prints."""
