"""A fault made on purpose, the load on it, the timeline and the verdict; it starts no gateway."""
