"""The planner: observes, lets a policy decide, and acts; in the arbiter, in a pod, or in the simulator."""
