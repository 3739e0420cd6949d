"""Parts of the package that are not part of its API: checkpoints, plugins, files and locks, arrays on devices."""
