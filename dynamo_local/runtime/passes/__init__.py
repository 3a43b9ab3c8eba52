"""Forward passes on their way: Dynamo's formats, what a worker keeps of them, and Dynamo's event plane."""
