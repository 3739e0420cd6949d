"""The server's side of a federation over Flower: clients, requests and replies."""
