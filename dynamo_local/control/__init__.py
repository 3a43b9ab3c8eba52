"""The arbiter: what it knows of its workers, and what it does with them."""
