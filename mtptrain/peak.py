"""The most memory this process has held so far."""

import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_bytes() -> int:
    """Resident bytes at their peak. Linux: of this program alone; its getrusage would count what its parent held when it was started."""
    if _STATUS.exists():
        found = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(found.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << (0 if sys.platform == "darwin" else 10)
