"""The server's part of every engine: what an algorithm can ask, how updates are averaged, and the Worker interface."""
