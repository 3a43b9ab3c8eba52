"""What `dynamo serve` refuses before anything is started."""
