"""`dynamo simulate` and `dynamo plan`: the same machine and policies as the arbiter, on a virtual clock."""
