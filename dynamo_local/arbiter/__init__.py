"""The supervising process: starts workers, watches them, drains and ends them, and answers `dynamo` and `circusctl`."""
