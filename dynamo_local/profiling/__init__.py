"""`dynamo profile` and `dynamo plan`: a configuration's engines, measured here, and what a fleet of them can do.

What is measured, and what the numbers say, is decided in `profiles.measuring` (pure); here a graph is driven by it.
"""
