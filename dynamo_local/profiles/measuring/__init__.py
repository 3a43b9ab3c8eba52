"""How an engine is measured: which points, how often, what the numbers say, and what was noticed. Pure values.

What drives a real engine by it is the room `profiling`; its tests drive an engine whose truth they know.
"""
