"""From a `DynamoGraphDeployment` to a configuration for one host, and what does not carry over."""
