"""Engine for clients on other machines, which communicate over Flower (needs the extra `flower`).

- `server`: the engine of the server, its connection to the clients and its requests
- `client`: the client, its store and its replies
- `messages`, `serialization`, `protocol`, `model_parts`: the format of requests and replies
- `local_grid`: a network within one process, for tests
"""
