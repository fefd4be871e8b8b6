"""Real models, and small ones to train, written as Equinox modules with their sites named."""
