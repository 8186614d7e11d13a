"""Certificates for a test: a CA of its own, and files that are replaced as Kubernetes replaces them."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

NAMES = ("localhost", "127.0.0.1")


class Authority:
    """A CA, whose certificate lies at `ca_file`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA()
        self.ca_file = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(str(self.ca_file))

    def issue(self, *names: str, ends_in: timedelta = timedelta(days=90)) -> trustme.LeafCert:
        now = datetime.now(UTC)
        begins = min(now, now + ends_in) - timedelta(days=1)
        return self._ca.issue_cert(*(names or NAMES), not_before=begins, not_after=now + ends_in)

    def trusted(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca_file)


def put(path: Path, data: str | bytes) -> None:
    """Replace a file in one step."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(data.encode() if isinstance(data, str) else data)
    new.replace(path)


class Mounted:
    """`tls.crt` and `tls.key` in a folder, as cert-manager's Secret has them."""

    def __init__(self, folder: Path, leaf: trustme.LeafCert) -> None:
        folder.mkdir()
        self.cert, self.key = folder / "tls.crt", folder / "tls.key"
        self.replace(leaf)

    def replace(self, leaf: trustme.LeafCert) -> None:
        """The key first: for a moment the two do not belong together."""
        put(self.key, leaf.private_key_pem.bytes())
        put(self.cert, b"".join(each.bytes() for each in leaf.cert_chain_pems))
