"""What computes tokens, behind the `Engine` Protocol of `dynamo_local.ports`."""
