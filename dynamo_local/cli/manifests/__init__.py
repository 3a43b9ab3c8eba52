"""`dynamo export` and `dynamo import`."""
