"""The server's part of all engines: requests of algorithms, cross-evaluation, feature statistics and traffic."""
