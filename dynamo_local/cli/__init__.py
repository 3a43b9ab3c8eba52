"""The `dynamo` command line: composition only. It wires parts together and decides nothing."""
