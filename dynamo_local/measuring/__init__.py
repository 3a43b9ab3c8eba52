"""`dynamo profile`: starts a graph, measures its engines, and writes a profile."""
