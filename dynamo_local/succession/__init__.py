"""What a killed arbiter leaves, and who takes it over."""
