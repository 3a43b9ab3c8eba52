"""Components that are commands of somebody else: HTTP servers, Dynamo 1.x workers, any process."""
