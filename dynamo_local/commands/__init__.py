"""Components that are commands: a runner, which is a worker like any other, and a driver for each runtime."""
