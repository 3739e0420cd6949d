"""A real deployment under faults that a schedule makes: `python -m tests.soak a b`, or `make soak`.

Soak A (`kills.py`) kills processes again and again, and must end as an undisturbed run does, bit for bit. Soak B
(`faults.py`) has clients with rhythms of their own, one that is stopped, a full disk, damaged files, a new certificate,
a revoked key and a client of the protocol before, and must end as the simulator does with the same participation.
Faults wait for lines of the server's log, never for the clock, and each one is printed.
"""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")
