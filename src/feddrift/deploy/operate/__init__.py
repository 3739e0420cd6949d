"""Commands for the operator of a deployment: set it up, check it, manage keys, go back, back it up."""
