"""Commands for the operator of a deployment: create and check it, manage keys, roll back, back up and restore."""
