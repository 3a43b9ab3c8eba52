"""Where decisions go."""
