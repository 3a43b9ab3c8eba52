"""The `dynamo` command: one module per command. A command parses its words, asks the arbiter, and prints the answer."""
