"""`dynamo serve`: a run from its start to its end. Puts the arbiter together and joins what the other rooms made."""
