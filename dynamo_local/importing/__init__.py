"""From files of other tools to a configuration: `dynamo import FILE`."""
