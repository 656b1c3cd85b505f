"""Which samples a loader gives, and in which order."""
