"""A planner that keeps targets: forecast at each actuator's lead, sized by queueing, held by what was seen of both."""
