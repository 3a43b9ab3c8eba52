"""Regret of planners against the best fixed fleet, on families of loads that nothing was tuned on."""
