"""Real clients over Flower: each keeps its data, the server keeps the identities (needs the extra `flower`)."""
