"""Dynamo 1.x's own workers as components."""
