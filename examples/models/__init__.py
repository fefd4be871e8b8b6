"""Real models, written as Equinox modules with their sites named."""
