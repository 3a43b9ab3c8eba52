"""Records of decisions."""
