"""Our policies before judges that are not ours: Dynamo 1.6.1's own simulator."""
