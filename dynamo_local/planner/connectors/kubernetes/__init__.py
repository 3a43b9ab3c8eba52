"""Decisions carried out by Dynamo's operator: replica counts of a DynamoGraphDeployment, read and changed.

What is decided here is pure: documents to values (`reading`), values to writes or refusals (`changing`), to pools
(`counting`), to faults (`checking`), to who leads (`leading`). `api` asks the API server over a `Transport`.
"""
