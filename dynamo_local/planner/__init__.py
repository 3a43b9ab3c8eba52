"""What decides how many workers there are, and what carries such decisions out."""
