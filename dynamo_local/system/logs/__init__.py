"""Logs: the files that processes write, lines by time, logs of JSON lines, and whose request a line is about."""
