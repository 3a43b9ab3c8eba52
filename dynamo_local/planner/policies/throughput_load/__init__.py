"""The planner of seed 001 and Dynamo 1.6.1: a throughput loop sets the floor, a load loop moves above it. Pure."""
