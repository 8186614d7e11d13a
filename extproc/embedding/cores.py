"""How many workers the machine, or the container's share of it, has cores for; it starts none."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath


def default_workers(
    *, cgroup: Path = Path("/proc/self/cgroup"), hierarchy: Path = Path("/sys/fs/cgroup")
) -> int:
    """The cores this process may use, less one for Envoy and the event loop; at least one."""
    cores = float(len(os.sched_getaffinity(0)))
    return max(1, int(min(cores, _quota(cgroup, hierarchy))) - 1)


def _quota(cgroup: Path, hierarchy: Path) -> float:
    """The smallest cgroup v2 CPU quota from our own group up to the root, in cores."""
    try:
        unified = next(
            line[3:] for line in cgroup.read_text().splitlines() if line.startswith("0::")
        )
    except (OSError, StopIteration):
        return float("inf")
    own = PurePosixPath(unified.lstrip("/"))
    quotas = [float("inf")]
    for group in (own, *own.parents):
        try:
            quota, period = (hierarchy / group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue  # the root group has no such file, and cgroup v1 none at all
        if quota != "max":
            quotas.append(int(quota) / int(period))
    return min(quotas)
