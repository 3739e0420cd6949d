from __future__ import annotations

import importlib.util

# Documentation tests look into every module; these need an extra.
collect_ignore_glob = [] if importlib.util.find_spec("flwr") else ["feddrift/engines/flower/*", "feddrift/deploy/*"]
