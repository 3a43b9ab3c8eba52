"""One run, as others see it: what it is told to do, and what it says of itself."""
