"""Recorded requests: files of JSON lines, read line by line, refused by file, line and field."""
