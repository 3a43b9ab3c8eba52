"""What planners see, forecast and propose, as values that every policy, plugin, source and simulation shares."""
