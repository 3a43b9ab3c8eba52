"""From a resolved configuration to a `DynamoGraphDeployment`, and what does not carry over."""
