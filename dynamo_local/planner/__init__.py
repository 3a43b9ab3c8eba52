"""The planner: collects observations, lets a policy decide, and carries the decision out. It runs in the arbiter,

in a pod, or in the simulator.
"""
