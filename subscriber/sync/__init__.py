"""One step of a host, from the channel to engines that serve."""
